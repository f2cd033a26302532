"""The prefix cache: keys and values that were computed once are copied instead of computed again.

`PrefixStore` is the interface; `Prefixes` is a generation's use of it. A block holds the rows of some tokens and is
named by a chain of hashes (`Keys`). `Memory` has blocks within a budget; `Disk` has their files, and one table of them
that all processes share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.prefix.baked import BakedPrefix as BakedPrefix
    from edgekv.prefix.baked import add_baked as add_baked
    from edgekv.prefix.baked import baked_prefixes as baked_prefixes
    from edgekv.prefix.baked import remove_baked as remove_baked
    from edgekv.prefix.config import StoreConfig as StoreConfig
    from edgekv.prefix.listing import remove_stored as remove_stored
    from edgekv.prefix.listing import stored_prefixes as stored_prefixes
    from edgekv.prefix.prefixes import PrefixCache as PrefixCache
    from edgekv.prefix.prefixes import Prefixes as Prefixes
    from edgekv.prefix.prefixes import open_prefixes as open_prefixes
    from edgekv.prefix.prefixes import open_store as open_store
    from edgekv.prefix.prefixes import prefix_fingerprint as prefix_fingerprint
    from edgekv.prefix.retention import RetentionPolicy as RetentionPolicy
    from edgekv.prefix.retention import TokenRangeRetentionConfig as TokenRangeRetentionConfig
    from edgekv.prefix.rows import GroupRows as GroupRows
    from edgekv.prefix.stats import StoreStats as StoreStats
    from edgekv.prefix.store import Match as Match
    from edgekv.prefix.store import PrefixStore as PrefixStore
    from edgekv.prefix.store import Snapshot as Snapshot

__getattr__, __all__ = lazy(__name__, __file__)
