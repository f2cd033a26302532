"""The update strategies by name."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from edgekv.errors import UsageError
from edgekv.kv.strategies.mirror import Mirror
from edgekv.kv.strategies.ordered_slot import OrderedSlot as OrderedSlot
from edgekv.kv.strategies.pointer_shift import DEFAULT_RESERVE, PointerShift
from edgekv.kv.strategies.shift_concat import ShiftConcat
from edgekv.kv.strategies.slot import Slot
from edgekv.kv.strategies.strategy import Strategy
from edgekv.spec.geometry import RowSpec

StrategyName = Literal["pointer-shift", "slot", "mirror", "shift-concat"]
STRATEGIES: tuple[StrategyName, ...] = ("pointer-shift", "slot", "mirror", "shift-concat")
DEFAULT_STRATEGY: StrategyName = "slot"
"""The default, also of plans: one strided write per step and no rebinding need the least host time."""
# `mirror` needs rings of whole pages, and `shift-concat` moves all rows in every step anyway.
GROWING_STRATEGIES: tuple[StrategyName, ...] = ("slot", "pointer-shift")


def default_strategy(reserve: Fraction | float | str | None = None) -> StrategyName:
    """The strategy of a cache that names none: `pointer-shift` if its reserve is given, which no other has."""
    return DEFAULT_STRATEGY if reserve is None else "pointer-shift"


def make_strategy(
    name: str, geometry: RowSpec, *, max_ar: int, reserve: Fraction | float = DEFAULT_RESERVE
) -> Strategy:
    """An update strategy by name; only `pointer-shift` uses `reserve`.

    Raises:
        UsageError: no such strategy, or a reserve that is not above 1 and at most 2.
    """
    if name == "pointer-shift":
        return PointerShift(geometry, reserve, max_ar=max_ar)
    if name == "slot":
        return Slot(geometry, max_ar=max_ar)
    if name == "shift-concat":
        return ShiftConcat(geometry, max_ar=max_ar)
    if name == "mirror":
        return Mirror(geometry, max_ar=max_ar)
    names = " or ".join(STRATEGIES)
    raise UsageError("update strategy", got=repr(name), expected=names, fix=f"Use {names}.")
