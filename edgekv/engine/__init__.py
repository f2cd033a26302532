"""Tokens in, tokens out: requests, the caches that they run in, and the steps that advance them."""

from edgekv.engine.adapters import BoundAdapter as BoundAdapter, LoraChoice as LoraChoice
from edgekv.engine.batch import Batch as Batch
from edgekv.engine.beams import BeamResult as BeamResult, BeamSequence as BeamSequence, BeamStats as BeamStats
from edgekv.engine.cache_mode import CacheMode as CacheMode, parse_budget as parse_budget
from edgekv.engine.caches import CacheSetup as CacheSetup
from edgekv.engine.drafting import Drafting as Drafting
from edgekv.engine.engine import Call as Call, Engine as Engine, Generation as Generation, Scoring as Scoring
from edgekv.engine.pool import PoolStats as PoolStats, SessionPool as SessionPool
from edgekv.engine.request import DEFAULT_CACHE as DEFAULT_CACHE, Request as Request
from edgekv.engine.sequence import Event as Event, Scores as Scores, Sequence as Sequence, Status as Status
from edgekv.engine.session import CacheUse as CacheUse, Graphs as Graphs, Session as Session
from edgekv.engine.sink import read_sink as read_sink
from edgekv.engine.speculation import (
    DrafterStats as DrafterStats,
    SpeculationRun as SpeculationRun,
    SpeculationStats as SpeculationStats,
)
from edgekv.engine.stats import (
    EngineGauges as EngineGauges,
    GenerationStats as GenerationStats,
    GenerationTimes as GenerationTimes,
    Setup as Setup,
)
