"""Running the static graphs of a bundle on memory that the KV cache owns."""

from edgekv.graphs.cpu_mode import CPU_MODES, CpuMode
from edgekv.htp_options import HtpOptions
from edgekv.runtime.binding import BatchInvariance
from edgekv.runtime.cpu import CpuEngine
from edgekv.runtime.engine import Engine, EngineType, find_engines, make_engine
from edgekv.runtime.graph import RowView, StaticGraph, StepTimes, tree_views
from edgekv.runtime.htp import HtpEngine
from edgekv.runtime.litert import LitertEngine
from edgekv.runtime.tflite import TfliteEngine

__all__ = [
    "CPU_MODES",
    "CpuEngine",
    "CpuMode",
    "Engine",
    "EngineType",
    "HtpEngine",
    "HtpOptions",
    "LitertEngine",
    "BatchInvariance",
    "RowView",
    "StaticGraph",
    "StepTimes",
    "TfliteEngine",
    "find_engines",
    "make_engine",
    "tree_views",
]
