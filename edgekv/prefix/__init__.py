"""The prefix cache: keys and values that were computed once are copied instead of computed again.

`PrefixStore` is the interface; `Prefixes` is a generation's use of it. A block holds the rows of some tokens and is
named by a chain of hashes (`Keys`). `Memory` has blocks within a budget; `Disk` has their files, and one table of them
that all processes share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.prefix.baked import (
        BakedPrefix as BakedPrefix,
        add_baked as add_baked,
        baked_prefixes as baked_prefixes,
        remove_baked as remove_baked,
    )
    from edgekv.prefix.config import StoreConfig as StoreConfig
    from edgekv.prefix.listing import remove_stored as remove_stored, stored_prefixes as stored_prefixes
    from edgekv.prefix.prefixes import (
        PrefixCache as PrefixCache,
        Prefixes as Prefixes,
        open_prefixes as open_prefixes,
        open_store as open_store,
        prefix_fingerprint as prefix_fingerprint,
    )
    from edgekv.prefix.retention import (
        RetentionPolicy as RetentionPolicy,
        TokenRangeRetentionConfig as TokenRangeRetentionConfig,
    )
    from edgekv.prefix.rows import GroupRows as GroupRows
    from edgekv.prefix.stats import StoreStats as StoreStats
    from edgekv.prefix.store import Match as Match, PrefixStore as PrefixStore, Snapshot as Snapshot

__getattr__, __all__ = lazy(__name__, __file__)
