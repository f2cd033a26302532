"""Running the static graphs of a bundle on memory that the KV cache owns."""

from edgekv.runtime.engine import ENGINES, CpuEngine, Engine, EngineName, HtpEngine, make_engine
from edgekv.runtime.graph import StaticGraph
from edgekv.runtime.litert import LitertEngine
from edgekv.runtime.tflite import TfliteEngine

__all__ = [
    "ENGINES",
    "CpuEngine",
    "Engine",
    "EngineName",
    "HtpEngine",
    "LitertEngine",
    "StaticGraph",
    "TfliteEngine",
    "make_engine",
]
