"""The prefix cache: keys and values that were computed once are copied instead of computed again.

`PrefixStore` is the interface. Integers and bytes are separate: `Tree`, `Tiers` and `Index` decide where each block is,
and `BlockStorage` moves the bytes between primary memory, host memory and disk.
"""

from edgekv.prefix.allocator import BlockAllocator
from edgekv.prefix.baked import BakedPrefix, add_baked, baked_prefixes, remove_baked
from edgekv.prefix.config import StoreConfig
from edgekv.prefix.errors import PrefixError
from edgekv.prefix.groups import BlockGroup, split_layers
from edgekv.prefix.lease import Match
from edgekv.prefix.prefixes import PrefixCache, Prefixes, SharedStore, open_prefixes, open_store, prefix_fingerprint
from edgekv.prefix.retention import RetentionPolicy, TokenRangeRetentionConfig
from edgekv.prefix.rows import CacheRows
from edgekv.prefix.stats import StoreStats, TierStats
from edgekv.prefix.store import PrefixStore

__all__ = [
    "BakedPrefix",
    "BlockAllocator",
    "CacheRows",
    "BlockGroup",
    "Match",
    "PrefixCache",
    "PrefixError",
    "PrefixStore",
    "Prefixes",
    "RetentionPolicy",
    "SharedStore",
    "StoreConfig",
    "StoreStats",
    "TierStats",
    "TokenRangeRetentionConfig",
    "add_baked",
    "baked_prefixes",
    "open_prefixes",
    "open_store",
    "prefix_fingerprint",
    "remove_baked",
    "split_layers",
]
