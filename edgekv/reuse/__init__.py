"""The store of prefixes in the loop: found before prefill, filled while tokens are generated, baked into bundles."""

from edgekv.reuse.baked import BakedPrefix, add_baked, baked_prefixes, remove_baked
from edgekv.reuse.cache_rows import CacheRows
from edgekv.reuse.fingerprint import prefix_fingerprint
from edgekv.reuse.prefixes import Prefixes
from edgekv.reuse.shared_store import PrefixCache, SharedStore, open_store

__all__ = [
    "BakedPrefix",
    "CacheRows",
    "PrefixCache",
    "Prefixes",
    "SharedStore",
    "add_baked",
    "baked_prefixes",
    "open_store",
    "prefix_fingerprint",
    "remove_baked",
]
