"""What `edgekv bench` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgekv.errors import UsageError

DEFAULT_PROMPT_TOKENS = (128, 512)
DEFAULT_NEW_TOKENS = (128,)
DEFAULT_REPETITIONS = 5
MAX_REPETITIONS = 1000


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure. Lengths are in tokens.

    Attributes:
        prompt_tokens: lengths of prompts for prefill and for the time to the first token.
        new_tokens: numbers of tokens to decode.
        depths: tokens in the cache before either.
        repetitions: counted runs of each test.
        seed: of the random tokens.

    Raises:
        UsageError: a number out of range.
    """

    prompt_tokens: Sequence[int] = DEFAULT_PROMPT_TOKENS
    new_tokens: Sequence[int] = DEFAULT_NEW_TOKENS
    depths: Sequence[int] = (0,)
    repetitions: int = DEFAULT_REPETITIONS
    seed: int = 0

    def __post_init__(self) -> None:
        for field, values in (("prompt tokens", self.prompt_tokens), ("new tokens", self.new_tokens)):
            if any(value < 1 for value in values):
                raise UsageError(field, got=min(values), expected="at least 1", fix="Ask for a token or more.")
        if not 1 <= self.repetitions <= MAX_REPETITIONS:
            wanted = f"1 to {MAX_REPETITIONS}"
            raise UsageError("repetitions", got=self.repetitions, expected=wanted, fix="Use 5.")
