"""Tokens in, tokens out: sessions, sampling and streaming."""

from edgekv.session.adapters import LoraChoice
from edgekv.session.beam_run import BeamResult, BeamSequence, BeamStats
from edgekv.session.budget import ByteBudget, CacheBudget, FreeMemoryBudget, parse_budget
from edgekv.session.caches import CacheSetup
from edgekv.session.call import BeamCall, SamplingCall
from edgekv.session.constraint import Constraint, GrammarCompiler
from edgekv.session.events import GenerationStats, GenerationTimes, StopReason, Token
from edgekv.session.generation import Generation
from edgekv.session.grammar import Grammar
from edgekv.session.graphs import Graphs, StepTimes
from edgekv.session.mode import Adaptive, Always, Disabled, LongSequenceOnly, Mode, check_mode, parse_mode
from edgekv.session.params import BeamParams, EarlyStopping, SamplingParams
from edgekv.session.pool import PoolStats, SessionPool
from edgekv.session.processors import LogitsProcessor
from edgekv.session.sampler import Sampler
from edgekv.session.scoring import Scoring
from edgekv.session.sequence import Sequence
from edgekv.session.session import Session
from edgekv.session.session_stats import CacheUse, SessionStats
from edgekv.session.sink import read_sink
from edgekv.session.speculate import Speculate, SpeculateMode
from edgekv.session.speculation import DrafterStats, Speculation, SpeculationStats
from edgekv.session.text import Detokenizer, StopSequences
from edgekv.session.tools import Tool, ToolCall, Tools

__all__ = [
    "Adaptive",
    "Always",
    "BeamCall",
    "BeamParams",
    "BeamResult",
    "BeamSequence",
    "BeamStats",
    "ByteBudget",
    "CacheUse",
    "CacheBudget",
    "CacheSetup",
    "Constraint",
    "Detokenizer",
    "Disabled",
    "DrafterStats",
    "EarlyStopping",
    "FreeMemoryBudget",
    "Generation",
    "GenerationStats",
    "GenerationTimes",
    "Grammar",
    "GrammarCompiler",
    "Graphs",
    "LogitsProcessor",
    "LongSequenceOnly",
    "LoraChoice",
    "Mode",
    "PoolStats",
    "Sampler",
    "SamplingCall",
    "SamplingParams",
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
    "StopSequences",
    "Token",
    "Tool",
    "ToolCall",
    "Tools",
    "check_mode",
    "parse_budget",
    "parse_mode",
    "read_sink",
]
