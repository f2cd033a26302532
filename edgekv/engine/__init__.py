"""Running the static graphs of a bundle on memory that the KV cache owns."""

from edgekv.engine.engine import ENGINES, CpuEngine, Engine, EngineName, HtpEngine, make_engine
from edgekv.engine.graph import StaticGraph
from edgekv.engine.litert import LitertEngine
from edgekv.engine.runner import Runner, StepTimes
from edgekv.engine.tflite import TfliteEngine

__all__ = [
    "ENGINES",
    "CpuEngine",
    "Engine",
    "EngineName",
    "HtpEngine",
    "LitertEngine",
    "Runner",
    "StaticGraph",
    "StepTimes",
    "TfliteEngine",
    "make_engine",
]
