"""The cost of each update strategy for one cache."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edgekv.kv import Geometry, LayeredGeometry, Layout
from edgekv.plan.cache.choices import Choice
from edgekv.plan.cache.traffic import count_addresses, count_traffic


class StrategyCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one strategy in an endless generation with the policy sliding-window.

    Attributes:
        strategy: its name.
        reserve: memory of the strip in units of S-1 rows, for those that have one.
        formula_bytes: bytes by the formula of Qualcomm's note, if it has one.
        held_bytes: bytes allocated: whole rows, space for the new rows of the largest AR, 64-byte alignment.
        rows_per_tensor: rows of each tensor of the layers that attend to the whole context.
        scratch_rows_per_tensor: rows of each scratch tensor, for new rows that are copied into the cache afterwards.
        stride_bytes: from one such tensor to the next.
        tokens_before_copy: tokens decoded before the first copy; None if there is none.
        filling_bytes_per_token: bytes copied, mean over the first S-1 tokens.
        sliding_bytes_per_token: bytes copied, mean over the later tokens.
        worst_step_bytes: upper bound of the bytes copied in one step.
        rebound_tensors_per_step: graph inputs and outputs to bind again before each decode step, because their
            address changed.
        registered_addresses: addresses of the cache inputs and outputs of all graphs together. An HTP runtime
            registers each as a tensor of its own, once, when it loads.
        fits: whether the context fits the limit, if one was given.
        largest_context: the longest context that fits; None if none does.
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


def strategy_cost(choice: Choice, geometry: Geometry | LayeredGeometry, ar: Sequence[int]) -> StrategyCost:
    """The cost of one choice, without saying whether it fits."""
    context, max_ar = geometry.context, max(ar)
    groups = geometry.groups()
    counted = [(group, count_traffic(choice, group, context, max_ar)) for group in groups]
    row_bytes = [group.tensors * group.row_bytes for group in groups]
    extra_bytes = _key_column_bytes(choice, geometry)
    filling = sum(size * traffic.filling_rows for size, (_, traffic) in zip(row_bytes, counted, strict=True))
    sliding = sum(size * traffic.sliding_rows_per_token for size, (_, traffic) in zip(row_bytes, counted, strict=True))
    worst = sum(size * traffic.worst_step_rows for size, (_, traffic) in zip(row_bytes, counted, strict=True))
    starts = [traffic.tokens_before_copy for _, traffic in counted if traffic.tokens_before_copy is not None]
    widest = max(groups, key=lambda group: group.context)
    layout = Layout.of(widest, choice.make(widest, max_ar))
    return StrategyCost(
        strategy=choice.strategy,
        reserve=None if choice.reserve is None else float(choice.reserve),
        formula_bytes=choice.formula_bytes(geometry),
        held_bytes=choice.held_bytes(geometry, ar),
        rows_per_tensor=layout.rows,
        scratch_rows_per_tensor=layout.scratch_rows,
        stride_bytes=layout.stride_bytes,
        tokens_before_copy=0 if extra_bytes else min(starts, default=None),
        filling_bytes_per_token=filling / (context - 1) + extra_bytes,
        sliding_bytes_per_token=float(sliding) + extra_bytes,
        worst_step_bytes=worst + max_ar * extra_bytes,
        rebound_tensors_per_step=sum(group.tensors * traffic.moving_ends for group, traffic in counted),
        registered_addresses=sum(
            group.tensors * count_addresses(choice, group, max_ar, each) for group in groups for each in ar
        ),
    )


def _key_column_bytes(choice: Choice, geometry: Geometry | LayeredGeometry) -> int:
    """Bytes that keys as columns add to every token: graphs write new key columns to a scratch first."""
    if geometry.key_layout == "rows" or choice.strategy != "pointer-shift":
        return 0
    return sum(group.tensors // 2 * group.row_bytes for group in geometry.groups())
