"""The reference operator of the tests: OpenVINO's PagedAttention in numpy. Nothing imports it at run time.

`paged_attention` is the operator. `CacheEvictor` bounds a sequence's cache: it uses the operator's scores to choose
blocks to drop, and creates the inputs that rotate the kept keys to their new positions.
"""

from edgekv.paged.attention import paged_attention as paged_attention
from edgekv.paged.errors import PagedInputError as PagedInputError
from edgekv.paged.eviction import (
    CacheEvictionConfig as CacheEvictionConfig,
    CacheEvictor as CacheEvictor,
    Eviction as Eviction,
)
from edgekv.paged.ledger import AGGREGATIONS as AGGREGATIONS, Aggregation as Aggregation, ScoreLedger as ScoreLedger
from edgekv.paged.rotation import rotation_trig_lut as rotation_trig_lut
