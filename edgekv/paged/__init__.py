"""The reference operator of the tests: OpenVINO's PagedAttention in numpy. Nothing imports it at run time.

`paged_attention` is the operator. `CacheEvictor` bounds a sequence's cache: it uses the operator's scores to choose
blocks to drop, and creates the inputs that rotate the kept keys to their new positions.
"""

from edgekv.paged.attention import paged_attention
from edgekv.paged.errors import PagedInputError
from edgekv.paged.eviction import CacheEvictionConfig, CacheEvictor, Eviction
from edgekv.paged.ledger import AGGREGATIONS, Aggregation, ScoreLedger
from edgekv.paged.rotation import rotation_trig_lut

__all__ = [
    "AGGREGATIONS",
    "Aggregation",
    "CacheEvictionConfig",
    "CacheEvictor",
    "Eviction",
    "PagedInputError",
    "ScoreLedger",
    "paged_attention",
    "rotation_trig_lut",
]
