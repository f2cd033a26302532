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
    from edgekv.prefix.listing import remove_stored, stored_prefixes
    from edgekv.prefix.prefixes import PrefixCache, Prefixes, open_prefixes, open_store, prefix_fingerprint
    from edgekv.prefix.retention import RetentionPolicy, TokenRangeRetentionConfig
    from edgekv.prefix.rows import GroupRows
    from edgekv.prefix.stats import StoreStats
    from edgekv.prefix.store import Match, PrefixStore, Snapshot

__all__ = [
    "BakedPrefix",
    "GroupRows",
    "Match",
    "PrefixCache",
    "PrefixError",
    "PrefixStore",
    "Prefixes",
    "RetentionPolicy",
    "Snapshot",
    "StoreConfig",
    "StoreStats",
    "TokenRangeRetentionConfig",
    "add_baked",
    "baked_prefixes",
    "open_prefixes",
    "open_store",
    "prefix_fingerprint",
    "remove_baked",
    "remove_stored",
    "stored_prefixes",
]

__getattr__ = lazy(
    __name__,
    {
        "baked": "BakedPrefix add_baked baked_prefixes remove_baked",
        "config": "StoreConfig",
        "listing": "remove_stored stored_prefixes",
        "prefixes": "PrefixCache Prefixes open_prefixes open_store prefix_fingerprint",
        "retention": "RetentionPolicy TokenRangeRetentionConfig",
        "rows": "GroupRows",
        "stats": "StoreStats",
        "store": "Match PrefixStore Snapshot",
    },
)
