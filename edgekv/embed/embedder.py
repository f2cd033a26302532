"""From texts to requests of the engine, and from its rows to embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle
from edgekv.embed.reader import ReadText, TaskReader
from edgekv.engine.request import Request
from edgekv.errors import UsageError
from edgekv.spec import EmbeddingTask
from edgekv.spec.text import encode_around
from edgekv.text.texts import Texts

Vector = NDArray[np.float32]

_TINY = 1e-12
"""What sentence-transformers divides a vector of zeros by."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What goes in front of texts.

    Attributes:
        text: it.
        tokens: how many it has, without those that the tokenizer adds; 0 if it is pooled like the text.
    """

    text: str = ""
    tokens: int = 0


class Embedder(TaskReader[EmbeddingTask]):
    """Makes requests of texts, and embeddings of their rows. It runs nothing. Thread-safe."""

    def __init__(self, bundle: Bundle, texts: Texts) -> None:
        """For a bundle.

        Raises:
            UsageError: it writes text.
        """
        super().__init__(bundle, texts, EmbeddingTask)

    @property
    def width(self) -> int:
        """Elements of an embedding."""
        return self._manifest.model.result_width

    def check_dimensions(self, dimensions: int | None, field: str = "dimensions") -> int:
        """The first elements of an embedding that are wanted; all by default.

        Raises:
            UsageError: there are not so many.
        """
        if dimensions is None:
            return self.width
        if not 1 <= dimensions <= self.width:
            allowed = f"1 to {self.width}, the width of the model's embeddings"
            raise UsageError(field, got=dimensions, expected=allowed, fix=f"Use {self.width}, or leave it out.")
        return dimensions

    def prompt(self, name: str | None, field: str = "prompt_name") -> Prompt:
        """What goes in front of a text for a task; that of the default task without a name.

        Raises:
            UsageError: the bundle has no prompt of this name.
        """
        name = self.task.default_prompt if name is None else name
        if name is None:
            return Prompt()
        if name not in self.task.prompts:
            known = ", ".join(sorted(self.task.prompts)) or "none: the checkpoint has no prompts"
            raise UsageError(field, got=repr(name[:80]), expected=f"one of {known}", fix="Put it in front of the text.")
        text = self.task.prompts[name]
        if self.task.pools_prompt or not text:
            return Prompt(text)
        return Prompt(text, len(self._encoded(text, field)[1]))

    def _encoded(self, text: str, field: str) -> tuple[list[int], list[int], list[int]]:
        return encode_around(self._texts.tokenizer, text, vocab=self._manifest.model.vocab, field=field)

    def read(
        self, text: str | Sequence[int], field: str = "text", *, prompt: Prompt = Prompt(), cut_to: int | None = None
    ) -> ReadText:
        """The request for a text.

        Args:
            text: not empty; or its token ids, which are run as they are.
            field: its name in errors.
            prompt: what goes in front of it.
            cut_to: tokens beyond which the end of a text is left out, at most `max_tokens`; those that end all texts
                stay. None if it is not to be cut.

        Raises:
            ContextFullError: it is too long, and is not to be cut, or nothing of it would be left.
            UsageError: it is empty, not Unicode, or has an id that is not in the vocabulary.
        """
        if not text:
            raise UsageError(field, got="an empty text", expected="a text", fix="Leave it out.")
        if not isinstance(text, str):
            before, body, after = list[int](), self._texts.read_ids(text, field), list[int]()
        else:
            whole = prompt.text + text
            if cut_to is not None:
                whole = whole[: self._texts.max_characters]
            else:
                self._texts.check_length(whole, field)
            before, body, after = self._encoded(whole, field)
        before = [*self._sink_before([*before, *body]), *before]
        fixed = len(before) + len(after)
        if not (before or body or after):
            raise UsageError(field, got="no tokens", expected="at least one", fix="Leave it out.")
        whole_tokens = fixed + len(body)
        cut = max(0, whole_tokens - (self.max_tokens if cut_to is None else cut_to))
        if cut and (cut_to is None or cut >= len(body)):
            raise self._too_long(field, f"{whole_tokens} tokens", cut_to)
        tokens = (*before, *body[: len(body) - cut], *after)
        skipped = min(len(before) + prompt.tokens, len(tokens) - 1) if prompt.tokens else 0
        last = self.task.pooling == "last"
        return ReadText(Request(tokens, ends=last, scores=not last), skipped, cut)

    def embedding(self, text: ReadText, rows: Vector, dimensions: int) -> Vector:
        """The embedding of a text, its first elements: cut before it is normalized (Matryoshka, arXiv 2205.13147).

        Args:
            text: as `read` gives it.
            rows: what the engine gave for it, `[rows, width]`.
            dimensions: elements that are wanted.
        """
        return pooled(self.task, rows[-text.tokens :][text.skipped :], dimensions)


def pooled(task: EmbeddingTask, rows: Vector, dimensions: int | None = None) -> Vector:
    """The embedding of a text, of the rows `[T, width]` of its tokens.

    Args:
        task: how.
        rows: of the tokens that are pooled.
        dimensions: elements that are wanted; None for all.
    """
    whole = rows[-1] if task.pooling == "last" else rows.mean(0, dtype=np.float64).astype(np.float32)
    vector: Vector = whole[:dimensions]
    return vector / np.float32(max(float(np.linalg.norm(vector)), _TINY)) if task.normalizes else vector
