"""What reads texts for a model that writes none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from edgekv.bundle import Bundle
from edgekv.engine.request import Request, require_task
from edgekv.errors import ContextFullError, UsageError
from edgekv.spec import EmbeddingTask, RankingTask
from edgekv.spec.text import begins_with
from edgekv.text.texts import Texts

T = TypeVar("T", EmbeddingTask, RankingTask)


_TO_THE_LONGEST = -1


@dataclass(frozen=True, slots=True)
class ReadText:
    """A text as the engine runs it.

    Attributes:
        request: its tokens, and which rows are wanted.
        skipped: first rows that are not pooled.
        cut_tokens: tokens of the text that were left out.
    """

    request: Request
    skipped: int = 0
    cut_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens that are run."""
        return len(self.request.tokens)


class TaskReader(Generic[T]):
    """The bundle, its task, and how long what it reads may be. It runs nothing. Thread-safe.

    Attributes:
        task: what the model gives.
    """

    def __init__(self, bundle: Bundle, texts: Texts, kind: type[T]) -> None:
        """For a bundle whose task is of this kind.

        Raises:
            UsageError: it is not.
        """
        self.task: T = require_task(bundle, kind)
        self._texts = texts
        self._manifest = bundle.manifest
        sink = bundle.manifest.sink
        self._first = () if sink is None else tuple(sink.tokens)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest text: those of the bundle's context, or of what the checkpoint was trained for."""
        return min(self._manifest.context, self.task.max_tokens or self._manifest.context)

    def cut_to(self, tokens: int | None, field: str) -> int | None:
        """The number of tokens that texts are cut to, as clients of vLLM ask: -1 is the longest; None for no cut.

        Raises:
            UsageError: it is another number below 1.
        """
        if tokens is None:
            return None
        if tokens < 1 and tokens != _TO_THE_LONGEST:
            allowed = f"-1, for {self.max_tokens}, the longest text of the bundle, or at least 1"
            raise UsageError(field, got=tokens, expected=allowed, fix="Use -1, or leave it out.")
        return self.max_tokens if tokens == _TO_THE_LONGEST else min(tokens, self.max_tokens)

    def _sink_before(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the sink that a text does not begin with yet."""
        return () if begins_with(tokens, self._first) else self._first

    def _too_long(self, field: str, got: str, cut_to: int | None) -> ContextFullError:
        if cut_to is not None:
            expected = f"at least one token of it in {cut_to}, which it is cut to"
            return ContextFullError(
                field, got=got, expected=expected, fix="Let it be longer, or shorten what is around."
            )
        return ContextFullError(
            field,
            got=got,
            expected=f"at most {self.max_tokens}, the longest text of the bundle",
            fix="Shorten it, let it be cut (--truncate), or export with a larger --context.",
        )
