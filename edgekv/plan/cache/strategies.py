"""What each update strategy costs for one geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import msgspec

from edgekv.kv import DEFAULT_RESERVE, STRATEGIES, Geometry, Layout, Strategy, StrategyName, make_strategy
from edgekv.plan.cache.traffic import count_windows, measure_traffic

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
        """The strategy itself, empty, as the runtime makes it."""
        return make_strategy(self.strategy, geometry, max_ar=max_ar, reserve=self.reserve or DEFAULT_RESERVE)

    def held_bytes(self, geometry: Geometry, ar: Sequence[int]) -> int:
        """Bytes that a cache for graphs of these AR allocates."""
        return Layout.of(geometry, self.make(geometry, max(ar))).allocated_bytes

    def formula_bytes(self, geometry: Geometry) -> int | None:
        """Bytes by the formula of Qualcomm's HTP note, or None for a strategy that it does not have.

        reserve x 2 x layers x heads x (S-1) x D x bits/8: the note writes 2 x 2 for a reserve of 2.0, and 3 for 1.5.
        """
        if self.reserve is None:
            return None
        return int(self.reserve * geometry.tensors * geometry.past_rows(1) * geometry.row_bytes)


CHOICES: tuple[Choice, ...] = tuple(
    Choice(name, reserve) for name in STRATEGIES for reserve in (_RESERVES if name == _POINTER_SHIFT else (None,))
)


class StrategySize(msgspec.Struct, frozen=True, kw_only=True):
    """What one strategy costs; see `Traffic` for the generation that the copies are counted over.

    Attributes:
        strategy: its name.
        reserve: memory of the strip in units of S-1 rows, for those that have one.
        formula_bytes: by the formula of Qualcomm's note, where it has one.
        held_bytes: really allocated: whole rows, room for the new rows of the largest AR, 64-byte alignment.
        rows_per_tensor: rows of each of the N tensors.
        scratch_rows_per_tensor: rows of each of the N scratch tensors where new rows land that are copied later.
        stride_bytes: from one tensor to the next.
        tokens_before_copy: tokens generated one by one before the first byte is copied; None if none ever is.
        filling_bytes_per_token: copied, mean over the first S-1 tokens.
        sliding_bytes_per_token: copied, mean of those after.
        worst_step_bytes: the most that one step copies.
        rebound_tensors_per_step: graph inputs and outputs to bind anew before each decode step, because their address
            is another one.
        registered_addresses: addresses of the cache inputs and outputs of all graphs together, over an endless
            generation. A runtime of the HTP registers each as a tensor of its own, once, when it loads.
        fits: whether the context fits the budget, if one was given.
        largest_context: the largest one that does, or None if none does.
    """

    strategy: str
    reserve: float | None
    formula_bytes: int | None
    held_bytes: int
    rows_per_tensor: int
    scratch_rows_per_tensor: int
    stride_bytes: int
    tokens_before_copy: int | None
    filling_bytes_per_token: float
    sliding_bytes_per_token: float
    worst_step_bytes: int
    rebound_tensors_per_step: int
    registered_addresses: int
    fits: bool | None = None
    largest_context: int | None = None

    @property
    def label(self) -> str:
        """As `Choice.label`."""
        return self.strategy if self.reserve is None else f"{self.strategy} {self.reserve}"


def strategy_size(choice: Choice, geometry: Geometry, ar: Sequence[int]) -> StrategySize:
    """The cost of one choice, without a verdict."""
    make = partial(choice.make, geometry, max(ar))
    traffic = measure_traffic(make, context=geometry.context, max_ar=max(ar))
    windows = sum(count_windows(make, context=geometry.context, ar=each) for each in ar)
    layout = Layout.of(geometry, make())
    row_bytes = geometry.tensors * geometry.row_bytes
    return StrategySize(
        strategy=choice.strategy,
        reserve=None if choice.reserve is None else float(choice.reserve),
        formula_bytes=choice.formula_bytes(geometry),
        held_bytes=layout.allocated_bytes,
        rows_per_tensor=layout.rows,
        scratch_rows_per_tensor=layout.scratch_rows,
        stride_bytes=layout.stride_bytes,
        tokens_before_copy=traffic.tokens_before_copy,
        filling_bytes_per_token=float(traffic.filling_rows_per_token * row_bytes),
        sliding_bytes_per_token=float(traffic.sliding_rows_per_token * row_bytes),
        worst_step_bytes=traffic.worst_step_rows * row_bytes,
        rebound_tensors_per_step=traffic.moving_ends * geometry.tensors,
        registered_addresses=windows * geometry.tensors,
    )
