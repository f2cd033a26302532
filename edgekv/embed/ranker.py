"""From a query and documents to requests of the engine, and from its rows to scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from edgekv.bundle import Bundle
from edgekv.embed.embedder import Vector
from edgekv.embed.reader import ReadText, TaskReader
from edgekv.engine.request import Request
from edgekv.errors import UsageError
from edgekv.spec import RankingTask
from edgekv.spec.text import encode_pair, encode_with_places
from edgekv.text.texts import Texts

_MAX_EXPONENT = 700.0


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document, judged.

    Attributes:
        index: its place among the documents.
        score: how well it fits the query, larger is better; see `RankingTask.activation`.
    """

    index: int
    score: float


class Ranker(TaskReader[RankingTask]):
    """Makes requests of a query and documents, and scores of their rows. It runs nothing. Thread-safe."""

    def __init__(self, bundle: Bundle, texts: Texts) -> None:
        """For a bundle.

        Raises:
            UsageError: it is no reranker's.
        """
        super().__init__(bundle, texts, RankingTask)

    def check(self, query: str, instruction: str | None = None) -> None:
        """Check what all documents are judged by.

        Raises:
            UsageError: an empty query, or an instruction for a model that has no place for one.
        """
        if not query:
            raise UsageError("query", got="an empty text", expected="a text", fix="Give a query.")
        if instruction is not None and not self.task.instructed:
            no_query = "none: the model's template has no place for it"
            raise UsageError("instruction", got="one", expected=no_query, fix="Leave it out.")

    def read(
        self, query: str, document: str, field: str, *, instruction: str | None = None, cut_to: int | None = None
    ) -> ReadText:
        """The request for a document.

        Args:
            query: not empty.
            document: not empty.
            field: of the document, in errors.
            instruction: what the query asks for; None for the checkpoint's own.
            cut_to: tokens of query and document, at most `max_tokens`, beyond which the document's end is left out;
                None if it is not to be cut.

        Raises:
            ContextFullError: query and document are too long together, and it is not to be cut, or nothing of it would
                be left.
            UsageError: it is empty, or not Unicode.
        """
        if not document:
            raise UsageError(field, got="an empty text", expected="a text", fix="Leave it out.")
        if cut_to is not None:
            document = document[: self._texts.max_characters]
        self._texts.check_length(query + document, field)
        tokenizer, vocab = self._texts.tokenizer, self._manifest.model.vocab
        whole, longest = None, self.max_tokens if cut_to is None else cut_to
        while True:
            tokens, places = pair_tokens(tokenizer, self.task, query, document, instruction, vocab=vocab, field=field)
            tokens = [*self._sink_before(tokens), *tokens]
            over = len(tokens) - longest
            whole = len(tokens) if whole is None else whole
            if over <= 0:
                return ReadText(Request(tuple(tokens), ends=True), cut_tokens=max(0, whole - len(tokens)))
            if cut_to is None or over >= len(places):
                raise self._too_long(field, f"{len(tokens)} tokens, with the query", cut_to)
            document = document[: places[-over]]

    def score(self, rows: Vector) -> float:
        """The score of what the engine gave for a document, `[rows, 1]`."""
        return activated(self.task, float(rows[-1, 0]))

    @staticmethod
    def ranked(scores: Sequence[float], top_n: int | None = None) -> list[RankedDocument]:
        """The documents, best first; those of one score in their order."""
        ranked = [RankedDocument(index, score) for index, score in enumerate(scores)]
        return sorted(ranked, key=lambda document: -document.score)[:top_n]


def activated(task: RankingTask, logit: float) -> float:
    """The score of a logit."""
    if task.activation == "none":
        return logit
    return 1 / (1 + math.exp(min(-logit, _MAX_EXPONENT)))


def pair_tokens(
    tokenizer: Tokenizer,
    task: RankingTask,
    query: str,
    document: str,
    instruction: str | None = None,
    *,
    vocab: int,
    field: str = "document",
) -> tuple[list[int], list[int]]:
    """The tokens of a query and a document, and where those of the document begin in it, in characters.

    Raises:
        UsageError: a text that is not Unicode, or has a token beyond the vocabulary.
    """
    if not task.pieces:
        return encode_pair(tokenizer, query, document, vocab=vocab, field=field)
    text, behind = task.text(query, document, instruction), len((task.instructed or task.pieces)[-1])
    tokens, places = encode_with_places(tokenizer, text, vocab=vocab, field=field)
    first = len(text) - behind - len(document)
    return tokens, [max(0, at - first) for at in places if first <= at < len(text) - behind]
