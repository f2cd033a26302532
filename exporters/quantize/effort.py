"""The option `--effort`: how much time the rounding of weights is worth."""

from __future__ import annotations

from dataclasses import dataclass

from edgekv.errors import UsageError


@dataclass(frozen=True, slots=True)
class Effort:
    """How weights are rounded.

    Attributes:
        level: its number.
        descent_bits: coordinate descent follows GPTQ in types of at most so many bits; see `quant.descent`.
        weighs_attention: whether errors of queries count by what they do to attention; see
            `exporters.quantize.attention`.
        written_tokens: that the float model writes itself and that join the calibration text.
    """

    level: int
    descent_bits: int
    weighs_attention: bool
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
    Effort(1, descent_bits=0, weighs_attention=False, written_tokens=0),
    Effort(2, descent_bits=4, weighs_attention=False, written_tokens=0),
    Effort(3, descent_bits=8, weighs_attention=True, written_tokens=16_384),
    Effort(4, descent_bits=8, weighs_attention=True, written_tokens=32_768),
    Effort(5, descent_bits=8, weighs_attention=True, written_tokens=65_536),
)
DEFAULT_EFFORT = EFFORTS[1]
