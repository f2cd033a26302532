"""What `edgekv bench` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from edgekv.errors import UsageError
from edgekv.option import Option, parse_numbers

DEFAULT_PROMPT_TOKENS = (128, 512)
DEFAULT_NEW_TOKENS = (128,)
DEFAULT_REPETITIONS = 5
MAX_REPETITIONS = 1000


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure, with random tokens of a seed. Lengths are in tokens.

    Raises:
        UsageError: a number out of range.
    """

    prompt_tokens: Annotated[
        Sequence[int],
        Option(
            "Lengths of prompts, for prefill and for the time to the first token.",
            "-p --prompt-tokens",
            parse=parse_numbers,
            shown="128,512, or the context",
        ),
    ] = DEFAULT_PROMPT_TOKENS
    new_tokens: Annotated[
        Sequence[int], Option("Numbers of tokens to decode.", "-n --new-tokens", parse=parse_numbers)
    ] = DEFAULT_NEW_TOKENS
    depths: Annotated[
        Sequence[int], Option("Tokens in the cache before either.", "-d --depth", parse=parse_numbers)
    ] = (0,)
    repetitions: Annotated[int, Option("Counted runs of each test.", "-r --repetitions")] = DEFAULT_REPETITIONS
    seed: int = 0

    def __post_init__(self) -> None:
        for field, values in (("prompt tokens", self.prompt_tokens), ("new tokens", self.new_tokens)):
            if any(value < 1 for value in values):
                raise UsageError(field, got=min(values), expected="at least 1", fix="Ask for a token or more.")
        if not 1 <= self.repetitions <= MAX_REPETITIONS:
            expected = f"1 to {MAX_REPETITIONS}"
            raise UsageError("repetitions", got=self.repetitions, expected=expected, fix="Use 5.")
