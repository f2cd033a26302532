"""What a model gives if it writes no text: embeddings of texts, or scores of documents for a query."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

Pooling = Literal["last", "mean"]
"""Which tokens' results make the embedding of a text: that of the last one, or the mean of all."""
Activation = Literal["sigmoid", "none"]

_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 27)]


class EmbeddingTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="embedding"):
    """Embeddings: the head gives a vector of each token, and those of a text are pooled.

    Attributes:
        pooling: how.
        normalizes: whether embeddings have the length 1.
        prompts: what goes in front of texts, by the name of a task.
        default_prompt: name of that which texts get if nobody says another; None for none.
        pools_prompt: whether the mean is over the tokens of the prompt too.
        max_tokens: of a text, if the checkpoint says how many it was trained for.
    """

    noun: ClassVar[str] = "an embedder's bundle"
    use: ClassVar[str] = "Use edgekv embed, Model.embed or /v1/embeddings."

    pooling: Pooling
    normalizes: bool
    prompts: dict[str, _Text] = {}
    default_prompt: str | None = None
    pools_prompt: bool = True
    max_tokens: _Tokens | None = None

    def described(self, width: int) -> str:
        """It in words, for embeddings of so many elements."""
        of = "of the last token" if self.pooling == "last" else "the mean over all tokens"
        length = "of length 1, " if self.normalizes else ""
        names = ", ".join(sorted(self.prompts))
        return f"embeddings of {width} elements, {length}{of}" + (f"; prompts {names}" if names else "")


class RankingTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ranking"):
    """Scores: the head gives a number of the last token of a query and a document.

    Attributes:
        pieces: text before the query, between it and the document, and behind it; empty if the tokenizer joins both.
        instructed: the same with the texts before and behind an instruction in front; empty if there can be none.
        instruction: that which queries get if nobody says another; None for that of `pieces`.
        activation: what makes a score of the number.
        max_tokens: of query and document, if the checkpoint says how many it was trained for.
    """

    noun: ClassVar[str] = "a reranker's bundle"
    use: ClassVar[str] = "Use edgekv rerank, Model.rerank or /v1/rerank."

    pieces: tuple[_Text, ...] = ()
    instructed: tuple[_Text, ...] = ()
    instruction: _Text | None = None
    activation: Activation = "sigmoid"
    max_tokens: _Tokens | None = None

    def __post_init__(self) -> None:
        for name, texts, places in (("pieces", self.pieces, 3), ("instructed", self.instructed, 4)):
            if len(texts) not in (0, places):
                raise ValueError(f"{name}: got {len(texts)} texts; expected {places} or none")
        if self.instruction is not None and not self.instructed:
            raise ValueError("instruction: got one; expected none without a place for it")

    def described(self, width: int) -> str:
        """It in words."""
        text = "a template" if self.pieces else "the tokenizer's pairs"
        score = "from 0 to 1" if self.activation == "sigmoid" else "without bounds"
        return f"scores {score} of documents for a query, in {text}"

    def text(self, query: str, document: str, instruction: str | None = None) -> str:
        """The text that is run.

        Raises:
            ValueError: the tokenizer joins both, or there can be no instruction.
        """
        asked = self.instruction if instruction is None else instruction
        if asked is None and self.pieces:
            before, between, behind = self.pieces
            return before + query + between + document + behind
        if asked is not None and self.instructed:
            before, told, between, behind = self.instructed
            return before + asked + told + query + between + document + behind
        raise ValueError("text: got no template; expected one")


Task = EmbeddingTask | RankingTask
