"""Tokens in, tokens out: requests, the caches that they run in, and the steps that advance them."""

from edgekv.engine.adapters import BoundAdapter, LoraChoice
from edgekv.engine.batch import Batch
from edgekv.engine.beams import BeamResult, BeamSequence, BeamStats
from edgekv.engine.cache_mode import CacheMode, parse_budget
from edgekv.engine.caches import CacheSetup
from edgekv.engine.drafting import Drafting
from edgekv.engine.engine import Call, Engine, Generation, Scoring
from edgekv.engine.pool import PoolStats, SessionPool
from edgekv.engine.request import DEFAULT_CACHE, Request
from edgekv.engine.sequence import Event, Scores, Sequence, Status
from edgekv.engine.session import CacheUse, Graphs, Session
from edgekv.engine.sink import read_sink
from edgekv.engine.speculation import (
    DrafterStats,
    SpeculationRun,
    SpeculationStats,
)
from edgekv.engine.stats import EngineGauges, GenerationStats, GenerationTimes, Setup

__all__ = [
    "DEFAULT_CACHE",
    "Batch",
    "BeamResult",
    "BeamSequence",
    "BeamStats",
    "BoundAdapter",
    "CacheMode",
    "CacheSetup",
    "CacheUse",
    "Call",
    "DrafterStats",
    "Drafting",
    "Engine",
    "EngineGauges",
    "Event",
    "Generation",
    "GenerationStats",
    "GenerationTimes",
    "Graphs",
    "LoraChoice",
    "PoolStats",
    "Request",
    "Scores",
    "Scoring",
    "Sequence",
    "Session",
    "SessionPool",
    "Setup",
    "SpeculationRun",
    "SpeculationStats",
    "Status",
    "parse_budget",
    "read_sink",
]
