"""What each layer's spec makes of a cache: its group, and the bytes that it allocates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, singledispatch

from edgekv.kv.cache_group import CacheGroup
from edgekv.kv.columns import ColumnLayout
from edgekv.kv.delta_group import CheckpointGroup, TailGroup, tail_layout
from edgekv.kv.memory import Allocate
from edgekv.kv.policies.policy import Policy, SlidingWindow
from edgekv.kv.policies.rotation import KvEncoding
from edgekv.kv.rows import Layout, RowGroup
from edgekv.kv.state_group import StateGroup, state_rows
from edgekv.kv.strategies import make_strategy
from edgekv.spec.geometry import ConvSpec, DeltaSpec, LayerSpec, RowSpec


@dataclass(frozen=True, slots=True)
class GroupSetup:
    """How the groups of a cache are made.

    Attributes:
        ar: tokens per inference of the graphs, ascending.
        context: S of the largest graphs.
        first_context: S that memory which grows is made for at first; `context` for memory that does not.
        strategy: by name.
        reserve: of `pointer-shift`.
        policy: of layers that attend to the whole context; the others always keep the newest tokens.
        allocate: where memory comes from.
        encodings: of all tensors of the cache, in the order of their names, or none.
    """

    ar: Sequence[int]
    context: int
    first_context: int
    strategy: str
    reserve: Fraction | float
    policy: Policy
    allocate: Allocate
    encodings: tuple[KvEncoding, ...]


@singledispatch
def make_group(spec: LayerSpec, setup: GroupSetup, made: Sequence[CacheGroup]) -> CacheGroup:
    """Allocate the part of a cache that belongs to these layers.

    Args:
        spec: what they keep.
        setup: of the cache.
        made: the groups before it, in the order of the geometry.

    Raises:
        UsageError: no such strategy; also what `RowArena` raises.
        ValueError: no encodings, where checkpoints are computed with them.
    """
    raise TypeError(f"spec: got {type(spec).__name__}; expected a RowSpec, ConvSpec or DeltaSpec")


@make_group.register
def _(spec: RowSpec, setup: GroupSetup, made: Sequence[CacheGroup]) -> RowGroup:
    is_wide = spec.window == setup.context
    capacity = (setup.policy if is_wide else SlidingWindow()).capacity(spec.window)
    make = partial(make_strategy, setup.strategy, max_ar=setup.ar[-1], reserve=setup.reserve)
    context = setup.first_context if is_wide else setup.context
    return RowGroup(spec, make, setup.ar, capacity, context, setup.allocate)


@make_group.register
def _(spec: ConvSpec, setup: GroupSetup, made: Sequence[CacheGroup]) -> StateGroup:
    rows = state_rows(setup.strategy, spec, max_ar=setup.ar[-1], reserve=setup.reserve)
    return StateGroup(spec, rows, setup.ar[-1], setup.allocate)


@make_group.register
def _(spec: DeltaSpec, setup: GroupSetup, made: Sequence[CacheGroup]) -> TailGroup | CheckpointGroup:
    if spec.kind != "recurrent":
        return TailGroup(spec, setup.ar[-1], setup.allocate)
    # The matrices come last, after the tails that they are computed from.
    tails = [group for group in made if isinstance(group, TailGroup)]
    tensors = spec.tensors + sum(tail.geometry.tensors for tail in tails)
    return CheckpointGroup(spec, tails, setup.encodings[-tensors:], setup.allocate)


@singledispatch
def allocated_bytes(spec: LayerSpec, strategy: str, ar: Sequence[int], context: int, reserve: Fraction | float) -> int:
    """Bytes that the group of these layers allocates for graphs of these AR and contexts up to `context`."""
    raise TypeError(f"spec: got {type(spec).__name__}; expected a RowSpec, ConvSpec or DeltaSpec")


@allocated_bytes.register
def _(spec: RowSpec, strategy: str, ar: Sequence[int], context: int, reserve: Fraction | float) -> int:
    rows = make_strategy(strategy, spec, max_ar=max(ar), reserve=reserve)
    if spec.key_layout == "rows":
        return Layout.of(spec, rows).allocated_bytes
    keys = ColumnLayout.of(spec, rows, ar, context)
    return keys.allocated_bytes + Layout.of(spec, rows, ("value",)).allocated_bytes


@allocated_bytes.register
def _(spec: ConvSpec, strategy: str, ar: Sequence[int], context: int, reserve: Fraction | float) -> int:
    return Layout.of(spec, state_rows(strategy, spec, max_ar=max(ar), reserve=reserve)).allocated_bytes


@allocated_bytes.register
def _(spec: DeltaSpec, strategy: str, ar: Sequence[int], context: int, reserve: Fraction | float) -> int:
    return tail_layout(spec, max(ar)).allocated_bytes
