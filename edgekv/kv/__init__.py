"""The KV cache: integers, bytes, and nothing else.

Engines use `KVCache`. `Strategy` (row positions and copies) and `Policy` (behaviour when the context is full) are pure
integers; `Layout` gives the bytes of any strategy without allocating them.
"""

from edgekv.kv.arena import Arena as Arena, Rows as Rows
from edgekv.kv.cache import CacheStats as CacheStats, KVCache as KVCache
from edgekv.kv.cache_group import CacheGroup as CacheGroup
from edgekv.kv.columns import ColumnArena as ColumnArena, ColumnLayout as ColumnLayout
from edgekv.kv.delta_group import CheckpointGroup as CheckpointGroup, TailGroup as TailGroup, fold as fold
from edgekv.kv.growth import (
    GROWTHS as GROWTHS,
    Allocation as Allocation,
    Growth as Growth,
    GrowthName as GrowthName,
    parse_growth as parse_growth,
)
from edgekv.kv.layers import allocated_bytes as allocated_bytes
from edgekv.kv.memory import ALIGNMENT_BYTES as ALIGNMENT_BYTES
from edgekv.kv.policies.policy import (
    POLICIES as POLICIES,
    Fail as Fail,
    KeyDiff as KeyDiff,
    Policy as Policy,
    PolicyName as PolicyName,
    Sinks as Sinks,
    SlidingWindow as SlidingWindow,
    find_policy as find_policy,
)
from edgekv.kv.policies.rotation import KvEncoding as KvEncoding, Requantization as Requantization
from edgekv.kv.row_table import RowTable as RowTable
from edgekv.kv.rows import Layout as Layout, RowArena as RowArena, RowGroup as RowGroup
from edgekv.kv.shared_rows import SharedRows as SharedRows
from edgekv.kv.sink import Sink as Sink
from edgekv.kv.state import (
    CacheState as CacheState,
    StateError as StateError,
    read_state as read_state,
    write_state as write_state,
)
from edgekv.kv.state_group import (
    TAIL_TOKENS as TAIL_TOKENS,
    StateGroup as StateGroup,
    state_rows as state_rows,
    state_strip as state_strip,
)
from edgekv.kv.strategies import (
    DEFAULT_STRATEGY as DEFAULT_STRATEGY,
    STRATEGIES as STRATEGIES,
    StrategyName as StrategyName,
    default_strategy as default_strategy,
    make_strategy as make_strategy,
)
from edgekv.kv.strategies.mirror import Mirror as Mirror
from edgekv.kv.strategies.pointer_shift import (
    DEFAULT_RESERVE as DEFAULT_RESERVE,
    PointerShift as PointerShift,
    parse_reserve as parse_reserve,
)
from edgekv.kv.strategies.shift_concat import ShiftConcat as ShiftConcat
from edgekv.kv.strategies.slot import Slot as Slot
from edgekv.kv.strategies.strategy import Move as Move, Place as Place, Strategy as Strategy, Window as Window
from edgekv.spec.geometry import (
    KINDS as KINDS,
    ConvSpec as ConvSpec,
    DeltaSpec as DeltaSpec,
    KeyLayout as KeyLayout,
    Kind as Kind,
    KvDtype as KvDtype,
    KvTensor as KvTensor,
    LayerSpec as LayerSpec,
    RowSpec as RowSpec,
)
from edgekv.spec.layers import Geometry as Geometry, LayeredGeometry as LayeredGeometry
