"""The KV cache: integers, bytes, and nothing else.

Engines use `KVCache`. `Strategy` (row positions and copies) and `Policy` (behaviour when the context is full) are pure
integers; `Layout` gives the bytes of any strategy without allocating them.
"""

from edgekv.kv.arena import Arena, Rows
from edgekv.kv.cache import CacheStats, KVCache
from edgekv.kv.cache_group import CacheGroup
from edgekv.kv.columns import ColumnArena, ColumnLayout
from edgekv.kv.delta_group import CheckpointGroup, TailGroup, fold
from edgekv.kv.growth import GROWTHS, Allocation, Growth, GrowthName, parse_growth
from edgekv.kv.layers import allocated_bytes
from edgekv.kv.memory import ALIGNMENT_BYTES
from edgekv.kv.policies.policy import POLICIES, Fail, KeyDiff, Policy, PolicyName, Sinks, SlidingWindow, find_policy
from edgekv.kv.policies.rotation import KvEncoding, Requantization
from edgekv.kv.row_table import RowTable
from edgekv.kv.rows import Layout, RowArena, RowGroup
from edgekv.kv.shared_rows import SharedRows
from edgekv.kv.sink import Sink
from edgekv.kv.state import CacheState, StateError, read_state, write_state
from edgekv.kv.state_group import TAIL_TOKENS, StateGroup, state_rows, state_strip
from edgekv.kv.strategies import DEFAULT_STRATEGY, STRATEGIES, StrategyName, default_strategy, make_strategy
from edgekv.kv.strategies.mirror import Mirror
from edgekv.kv.strategies.pointer_shift import DEFAULT_RESERVE, PointerShift, parse_reserve
from edgekv.kv.strategies.shift_concat import ShiftConcat
from edgekv.kv.strategies.slot import Slot
from edgekv.kv.strategies.strategy import Move, Place, Strategy, Window
from edgekv.spec.geometry import KINDS, ConvSpec, DeltaSpec, KeyLayout, Kind, KvDtype, KvTensor, LayerSpec, RowSpec
from edgekv.spec.layers import Geometry, LayeredGeometry

__all__ = [
    "ALIGNMENT_BYTES",
    "Allocation",
    "DEFAULT_RESERVE",
    "DEFAULT_STRATEGY",
    "GROWTHS",
    "KINDS",
    "POLICIES",
    "STRATEGIES",
    "RowArena",
    "RowGroup",
    "RowSpec",
    "RowTable",
    "SharedRows",
    "StateGroup",
    "TAIL_TOKENS",
    "CheckpointGroup",
    "TailGroup",
    "fold",
    "Rows",
    "CacheGroup",
    "CacheState",
    "CacheStats",
    "ColumnArena",
    "ColumnLayout",
    "Fail",
    "ConvSpec",
    "DeltaSpec",
    "Geometry",
    "Growth",
    "GrowthName",
    "KVCache",
    "KeyDiff",
    "KeyLayout",
    "Kind",
    "KvDtype",
    "KvEncoding",
    "KvTensor",
    "LayeredGeometry",
    "LayerSpec",
    "Layout",
    "Mirror",
    "Move",
    "Place",
    "PointerShift",
    "Policy",
    "PolicyName",
    "Requantization",
    "ShiftConcat",
    "Sink",
    "Sinks",
    "SlidingWindow",
    "Slot",
    "StateError",
    "Arena",
    "Strategy",
    "StrategyName",
    "Window",
    "allocated_bytes",
    "default_strategy",
    "find_policy",
    "make_strategy",
    "state_rows",
    "state_strip",
    "parse_growth",
    "parse_reserve",
    "read_state",
    "write_state",
]
