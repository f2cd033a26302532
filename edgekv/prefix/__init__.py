"""The store of reusable prefixes: a token that was once computed is copied, never computed again.

`PrefixStore` is what a request calls. Behind it, integers and bytes are apart: `Tree`, `Tiers` and `Index` decide in
integers which block is where, and `BlockStorage` moves the bytes between primary memory, host memory and disk.
"""

from edgekv.prefix.allocator import BlockAllocator
from edgekv.prefix.budget import free_memory_bytes
from edgekv.prefix.config import StoreConfig
from edgekv.prefix.errors import PrefixError
from edgekv.prefix.groups import Group, split_layers
from edgekv.prefix.retention import RetentionPolicy, TokenRangeRetentionConfig
from edgekv.prefix.stats import StoreStats, TierStats
from edgekv.prefix.store import Match, PrefixStore

__all__ = [
    "BlockAllocator",
    "Group",
    "Match",
    "PrefixError",
    "PrefixStore",
    "RetentionPolicy",
    "StoreConfig",
    "StoreStats",
    "TierStats",
    "TokenRangeRetentionConfig",
    "free_memory_bytes",
    "split_layers",
]
