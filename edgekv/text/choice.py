"""Which token comes next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from edgekv.text.constraint import Constraint
from edgekv.text.sampler import Sampler


class TokenChoice:
    """Chooses the tokens of a text: those that its constraint forces, otherwise the sampler's.

    Attributes:
        forced_tokens: how many were forced.
    """

    def __init__(self, sampler: Sampler, constraint: Constraint | None) -> None:
        """Args: sampler: chooses by logits. constraint: at the start of the text; None for free text."""
        self.forced_tokens = 0
        self._sampler = sampler
        self._constraint = constraint
        self._forced: deque[int] = deque()  # tokens of the text that are known already

    @property
    def needs_logits(self) -> bool:
        """Whether the next token is not forced."""
        return not self._forced

    @property
    def is_complete(self) -> bool:
        """Whether the constraint allows no further token."""
        return self._constraint is not None and self._constraint.is_complete

    def next(self, logits: NDArray[Any] | None, prompt: Sequence[int], generated: list[int]) -> int:
        """The next token.

        Args:
            logits: after the text, as integers `[V]`; None only if the next token is forced.
            prompt: token ids.
            generated: those chosen so far.

        Raises:
            UsageError: a logits processor left nothing to choose from.
        """
        constraint = self._constraint
        if constraint is None:
            assert logits is not None
            return self._sampler(logits, prompt, generated)
        if not self._forced and not generated:
            self._forced.extend(constraint.forced())
        if self._forced:
            token = self._forced.popleft()
            self.forced_tokens += 1
        else:
            assert logits is not None
            token = self._sampler(logits, prompt, generated, constraint.allowed())
        constraint.push(token)
        if not self._forced:
            self._forced.extend(constraint.forced())
        return token
