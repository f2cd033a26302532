"""Running the static graphs of a bundle on memory that the KV cache owns."""

from edgekv.engine.engine import ENGINES, CpuEngine, Engine, EngineName, HtpEngine, make_engine
from edgekv.engine.graph import StaticGraph
from edgekv.engine.runner import Runner, StepTimes

__all__ = [
    "ENGINES",
    "CpuEngine",
    "Engine",
    "EngineName",
    "HtpEngine",
    "Runner",
    "StaticGraph",
    "StepTimes",
    "make_engine",
]
