"""The prefix cache: keys and values that were computed once are copied instead of computed again.

`PrefixStore` is the interface; `Prefixes` is a generation's use of it. A block holds the rows of some tokens and is
named by a chain of hashes (`Keys`). `Memory` has blocks within a budget; `Disk` has their files, and one table of them
that all processes share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.errors import PrefixError
from edgekv.lazy import lazy

if TYPE_CHECKING:
    from edgekv.prefix.baked import BakedPrefix, add_baked, baked_prefixes, remove_baked
    from edgekv.prefix.config import StoreConfig
    from edgekv.prefix.listing import StoredPrefix, remove_stored, stored_prefixes
    from edgekv.prefix.prefixes import PrefixCache, Prefixes, SharedStore, open_prefixes, open_store, prefix_fingerprint
    from edgekv.prefix.retention import RetentionPolicy, TokenRangeRetentionConfig
    from edgekv.prefix.rows import BlockGroup, CacheRows, GroupRows, split_layers
    from edgekv.prefix.stats import StoreStats, TierStats
    from edgekv.prefix.store import Match, PrefixStore, Snapshot

__all__ = [
    "BakedPrefix",
    "BlockGroup",
    "CacheRows",
    "GroupRows",
    "Match",
    "PrefixCache",
    "PrefixError",
    "PrefixStore",
    "Prefixes",
    "RetentionPolicy",
    "SharedStore",
    "Snapshot",
    "StoreConfig",
    "StoreStats",
    "StoredPrefix",
    "TierStats",
    "TokenRangeRetentionConfig",
    "add_baked",
    "baked_prefixes",
    "open_prefixes",
    "open_store",
    "prefix_fingerprint",
    "remove_baked",
    "remove_stored",
    "split_layers",
    "stored_prefixes",
]

__getattr__ = lazy(
    __name__,
    {
        "baked": "BakedPrefix add_baked baked_prefixes remove_baked",
        "config": "StoreConfig",
        "listing": "StoredPrefix remove_stored stored_prefixes",
        "prefixes": "PrefixCache Prefixes SharedStore open_prefixes open_store prefix_fingerprint",
        "retention": "RetentionPolicy TokenRangeRetentionConfig",
        "rows": "BlockGroup CacheRows GroupRows split_layers",
        "stats": "StoreStats TierStats",
        "store": "Match PrefixStore Snapshot",
    },
)
