"""Which adapter to merge, and how strongly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from edgekv.errors import UsageError
from edgekv.option import check_place

_LARGEST_SCALE = 100


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """A LoRA adapter and its scale.

    Attributes:
        folder: with `adapter_config.json`.
        scale: multiplies what the adapter adds.
    """

    folder: Path
    scale: float = 1.0

    @classmethod
    def parse(cls, option: str, text: str) -> AdapterChoice:
        """Parse `DIR` or `DIR=SCALE`.

        Raises:
            UsageError: the folder does not exist, or the scale is 0 or above 100 in magnitude.
        """
        name, equals, number = text.rpartition("=")
        if Path(text).is_dir() or not equals:
            name, number = text, "1"
        if not Path(check_place(option, name)).is_dir():
            raise UsageError(
                option, got=f"{text!r}, which is no folder", expected="DIR or DIR=SCALE", fix="Check the path."
            )
        try:
            scale = float(number)
        except ValueError:
            scale = math.nan
        if not 0 < abs(scale) <= _LARGEST_SCALE:
            raise UsageError(
                option,
                got=f"the scale {number!r}",
                expected=f"a number up to {_LARGEST_SCALE}, and not 0",
                fix=f"Use {name}=1.",
            )
        return cls(Path(name), scale)
