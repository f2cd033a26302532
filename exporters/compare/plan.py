"""What a comparison measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from edgekv.errors import UsageError
from edgekv.option import Option


@dataclass(frozen=True, slots=True)
class ComparePlan:
    """What to measure; timed prompts are random tokens of a seed.

    Raises:
        UsageError: a number out of range.
    """

    tokens: Annotated[int, Option("Maximum number of tokens to predict.")] = 4096
    window: Annotated[
        int, Option("Maximum tokens of a window, up to the smaller context; the text is cut without overlap.")
    ] = 1024
    prompt_tokens: Annotated[int, Option("Tokens of the timed prompts.")] = 128
    new_tokens: Annotated[int, Option("Tokens generated after each of them; 0 measures no speed.")] = 32
    turns: Annotated[int, Option("Timed turns of each model, which alternate.")] = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for field, least in (("tokens", 1), ("window", 2), ("prompt_tokens", 1), ("new_tokens", 0), ("turns", 1)):
            if (number := getattr(self, field)) < least:
                raise UsageError(
                    f"--{field.replace('_', '-')}",
                    got=number,
                    expected=f"at least {least}",
                    fix=f"Use {least} or more.",
                )

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.window, self.prompt_tokens + self.new_tokens + 2)
