"""The option `--effort`: how much time the rounding of weights is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgekv.errors import UsageError

if TYPE_CHECKING:
    from edgekv.spec import Decoder
    from quant import Method


@dataclass(frozen=True, slots=True)
class Effort:
    """How weights are rounded.

    Attributes:
        level: its number.
        descent_bits: coordinate descent follows GPTQ in types of at most so many bits; see `quant.descent`.
        weighs_attention: whether errors of queries count by what they do to attention; see
            `exporters.quantize.attention`.
        written_tokens: that the float model writes itself and that join the calibration text.
        fits: whether integers are fitted to calibration text; otherwise weights are rounded to nearest, and the exact
            decoder alone runs, for ranges.
        max_calibration_tokens: by default; None for no limit.
    """

    level: int
    descent_bits: int
    weighs_attention: bool
    written_tokens: int
    fits: bool = True
    max_calibration_tokens: int | None = None

    @property
    def encoder_method(self) -> Method:
        """How the matrices of a vision encoder are rounded: they have 8 bits."""
        return "descent" if self.descent_bits >= 8 else "nearest"

    def calibration_tokens(self, decoder: Decoder) -> int:
        """Default number of calibration tokens."""
        from edgekv.plan import default_calibration_tokens  # it imports numpy; --help needs none of it

        tokens = default_calibration_tokens(decoder)
        return min(tokens, self.max_calibration_tokens or tokens)

    def written_windows(self, length: int) -> int:
        """Windows of so many tokens that hold `written_tokens`."""
        return -(-self.written_tokens // length)

    @classmethod
    def parse(cls, option: str, text: str) -> Effort:
        """Read the option.

        Raises:
            UsageError: no level has this number.
        """
        efforts = [effort for effort in EFFORTS if str(effort.level) == text]
        if not efforts:
            raise UsageError(option, got=repr(text), expected=f"0 to {EFFORTS[-1].level}", fix=f"Use {option} 3.")
        return efforts[0]


EFFORTS = (
    Effort(0, descent_bits=0, weighs_attention=False, written_tokens=0, fits=False, max_calibration_tokens=2048),
    Effort(1, descent_bits=0, weighs_attention=False, written_tokens=0),
    Effort(2, descent_bits=4, weighs_attention=False, written_tokens=0),
    Effort(3, descent_bits=8, weighs_attention=True, written_tokens=16_384),
    Effort(4, descent_bits=8, weighs_attention=True, written_tokens=32_768),
    Effort(5, descent_bits=8, weighs_attention=True, written_tokens=65_536),
)
DEFAULT_EFFORT = EFFORTS[2]
