"""The store of reusable prefixes: a token that was once computed is copied, never computed again.

`PrefixStore` is what a request calls. Behind it, integers and bytes are apart: `Tree`, `Tiers` and `Index` decide in
integers which block is where, and `BlockStorage` moves the bytes between primary memory, host memory and disk.
"""

from edgekv.prefix.allocator import BlockAllocator
from edgekv.prefix.baked import BakedPrefix, add_baked, baked_prefixes, remove_baked
from edgekv.prefix.cache_rows import CacheRows
from edgekv.prefix.config import StoreConfig
from edgekv.prefix.errors import PrefixError
from edgekv.prefix.fingerprint import prefix_fingerprint
from edgekv.prefix.groups import Group, split_layers
from edgekv.prefix.prefixes import Prefixes
from edgekv.prefix.retention import RetentionPolicy, TokenRangeRetentionConfig
from edgekv.prefix.shared_store import PrefixCache, SharedStore, open_store
from edgekv.prefix.stats import StoreStats, TierStats
from edgekv.prefix.store import Match, PrefixStore

__all__ = [
    "BakedPrefix",
    "BlockAllocator",
    "CacheRows",
    "Group",
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
    "open_store",
    "prefix_fingerprint",
    "remove_baked",
    "split_layers",
]
