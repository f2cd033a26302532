"""Tokens in, tokens out: requests, the caches that they run in, and the steps that advance them."""

from edgekv.engine.adapters import LoraChoice
from edgekv.engine.beam_run import BeamResult, BeamSequence, BeamStats
from edgekv.engine.budget import ByteBudget, CacheBudget, FreeMemoryBudget, parse_budget
from edgekv.engine.caches import CacheSetup
from edgekv.engine.call import BeamCall, SamplingCall
from edgekv.engine.events import GenerationStats, GenerationTimes, StopReason, Token
from edgekv.engine.generation import Generation
from edgekv.engine.graphs import Graphs, StepTimes
from edgekv.engine.mode import Adaptive, Always, Disabled, LongSequenceOnly, Mode, check_mode, parse_mode
from edgekv.engine.pool import PoolStats, SessionPool
from edgekv.engine.scoring import Scoring
from edgekv.engine.sequence import Sequence
from edgekv.engine.session import Session
from edgekv.engine.session_stats import CacheUse, SessionStats
from edgekv.engine.sink import read_sink
from edgekv.engine.speculate import Speculate, SpeculateMode
from edgekv.engine.speculation import DrafterStats, Speculation, SpeculationStats

__all__ = [
    "Adaptive",
    "Always",
    "BeamCall",
    "BeamResult",
    "BeamSequence",
    "BeamStats",
    "ByteBudget",
    "CacheBudget",
    "CacheSetup",
    "CacheUse",
    "Disabled",
    "DrafterStats",
    "FreeMemoryBudget",
    "Generation",
    "GenerationStats",
    "GenerationTimes",
    "Graphs",
    "LongSequenceOnly",
    "LoraChoice",
    "Mode",
    "PoolStats",
    "SamplingCall",
    "Scoring",
    "Sequence",
    "Session",
    "SessionPool",
    "SessionStats",
    "Speculate",
    "SpeculateMode",
    "Speculation",
    "SpeculationStats",
    "StepTimes",
    "StopReason",
    "Token",
    "check_mode",
    "parse_budget",
    "parse_mode",
    "read_sink",
]
