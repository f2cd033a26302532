"""Tokens in, tokens out: sessions, what is kept of them, sampling and streaming."""

from edgekv.session.budget import Budget, ByteBudget, FreeMemoryBudget, parse_budget
from edgekv.session.events import GenerationStats, StopReason, Token
from edgekv.session.feeder import Fed, SequenceFeeder
from edgekv.session.held import HeldSequence
from edgekv.session.loop import Generation
from edgekv.session.mode import Adaptive, Always, Disabled, LongSequenceOnly, Mode, check_mode, parse_mode
from edgekv.session.pool import SequenceManager
from edgekv.session.pool_stats import SequenceStats
from edgekv.session.sampler import Sampler, Sampling
from edgekv.session.text import Detokenizer, StopSequences

__all__ = [
    "Adaptive",
    "Always",
    "Budget",
    "ByteBudget",
    "Detokenizer",
    "Disabled",
    "Fed",
    "FreeMemoryBudget",
    "Generation",
    "GenerationStats",
    "HeldSequence",
    "LongSequenceOnly",
    "Mode",
    "Sampler",
    "Sampling",
    "SequenceFeeder",
    "SequenceManager",
    "SequenceStats",
    "StopReason",
    "StopSequences",
    "Token",
    "check_mode",
    "parse_budget",
    "parse_mode",
]
