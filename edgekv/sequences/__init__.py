"""Many sequences on one model, and what is kept of them.

`Mode` says which keys and values are kept, `SequenceManager` keeps the caches of sequences within a `Budget`, and
`SequenceFeeder` runs one of them.
"""

from edgekv.sequences.budget import Budget, ByteBudget, FreeMemoryBudget, free_memory_bytes, parse_budget
from edgekv.sequences.feeder import Fed, SequenceFeeder
from edgekv.sequences.manager import SequenceManager
from edgekv.sequences.mode import Adaptive, Always, Disabled, LongSequenceOnly, Mode, check_mode, parse_mode
from edgekv.sequences.sequence import HeldSequence
from edgekv.sequences.stats import SequenceStats

__all__ = [
    "Adaptive",
    "Always",
    "Budget",
    "ByteBudget",
    "Disabled",
    "Fed",
    "FreeMemoryBudget",
    "HeldSequence",
    "LongSequenceOnly",
    "Mode",
    "SequenceFeeder",
    "SequenceManager",
    "SequenceStats",
    "check_mode",
    "free_memory_bytes",
    "parse_budget",
    "parse_mode",
]
