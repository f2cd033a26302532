"""The compared update strategies, and the memory of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from edgekv.kv import (
    DEFAULT_RESERVE,
    DEFAULT_STRATEGY,
    STRATEGIES,
    ColumnLayout,
    Geometry,
    LayeredGeometry,
    Layout,
    Strategy,
    StrategyName,
    make_strategy,
    state_rows,
    tail_layout,
)

_POINTER_SHIFT: StrategyName = "pointer-shift"
_RESERVES = (DEFAULT_RESERVE, Fraction(3, 2))


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy as a user picks it.

    Attributes:
        strategy: its name.
        reserve: the reserve, for those that have one.
    """

    strategy: StrategyName
    reserve: Fraction | None = None

    @property
    def label(self) -> str:
        """Such as `pointer-shift 1.5`."""
        return self.strategy if self.reserve is None else f"{self.strategy} {float(self.reserve)}"

    def make(self, geometry: Geometry, max_ar: int) -> Strategy:
        """The strategy itself, empty, as the runtime creates it for layers with attention."""
        return make_strategy(self.strategy, geometry, max_ar=max_ar, reserve=self.reserve or DEFAULT_RESERVE)

    def held_bytes(self, geometry: Geometry | LayeredGeometry, ar: Sequence[int]) -> int:
        """Bytes that a cache for graphs of these AR allocates."""
        return sum(self._group_bytes(group, ar, geometry.context) for group in geometry.groups())

    def layer_bytes(self, geometry: Geometry | LayeredGeometry, ar: Sequence[int]) -> tuple[int, ...]:
        """Bytes of each layer, rounded up."""
        found = [0] * geometry.layers
        for group in geometry.groups():
            share = -(-self._group_bytes(group, ar, geometry.context) // group.layers)
            for layer in group.numbers or range(group.layers):
                found[layer] += share
        return tuple(found)

    def formula_bytes(self, geometry: Geometry | LayeredGeometry) -> int | None:
        """Bytes by the formula of Qualcomm's HTP note; None for other strategies.

        reserve x 2 x layers x heads x (S-1) x D x bits/8: the note writes 2 x 2 for a reserve of 2.0, and 3 for 1.5.
        """
        if self.reserve is None:
            return None
        attending = (group for group in geometry.groups() if not group.is_state)
        rows_bytes = sum(group.tensors * group.past_rows(1) * group.row_bytes for group in attending)
        return int(self.reserve * rows_bytes)

    def _group_bytes(self, group: Geometry, ar: Sequence[int], context: int) -> int:
        if group.is_delta:
            return tail_layout(group, max(ar)).allocated_bytes
        if group.is_state:
            rows = state_rows(self.strategy, group, max_ar=max(ar), reserve=self.reserve or DEFAULT_RESERVE)
            return Layout.of(group, rows).allocated_bytes
        strategy = self.make(group, max(ar))
        if group.key_layout == "rows":
            return Layout.of(group, strategy).allocated_bytes
        keys = ColumnLayout.of(group, strategy, ar, context)
        return keys.allocated_bytes + Layout.of(group, strategy, ("value",)).allocated_bytes


def _choices() -> tuple[Choice, ...]:
    names = sorted(STRATEGIES, key=lambda name: name != DEFAULT_STRATEGY)
    return tuple(
        Choice(name, reserve) for name in names for reserve in (_RESERVES if name == _POINTER_SHIFT else (None,))
    )


CHOICES = _choices()
"""Every strategy, the default of `edgekv generate` first."""


def choices_for(geometry: Geometry | LayeredGeometry) -> tuple[Choice, ...]:
    """The strategies for a key layout: `mirror` needs keys as rows."""
    return tuple(choice for choice in CHOICES if geometry.key_layout == "rows" or choice.strategy != "mirror")
