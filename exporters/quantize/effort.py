"""The option `--effort`: how much time the rounding of weights is worth."""

from __future__ import annotations

from dataclasses import dataclass

from edgekv.errors import UsageError


@dataclass(frozen=True, slots=True)
class Effort:
    """How weights are rounded.

    Attributes:
        level: its number.
        descends: whether coordinate descent follows GPTQ in 4 bits; see `quant.descent`.
        written_tokens: that the float model writes itself and that join the calibration text.
    """

    level: int
    descends: bool
    written_tokens: int

    @classmethod
    def parse(cls, option: str, text: str) -> Effort:
        """Read the option.

        Raises:
            UsageError: no level has this number.
        """
        found = [effort for effort in EFFORTS if str(effort.level) == text]
        if not found:
            raise UsageError(option, got=repr(text), expected=f"1 to {len(EFFORTS)}", fix=f"Use {option} 3.")
        return found[0]


EFFORTS = (
    Effort(1, descends=False, written_tokens=0),
    Effort(2, descends=True, written_tokens=0),
    Effort(3, descends=True, written_tokens=16_384),
    Effort(4, descends=True, written_tokens=49_152),
    Effort(5, descends=True, written_tokens=131_072),
)
DEFAULT_EFFORT = EFFORTS[1]
