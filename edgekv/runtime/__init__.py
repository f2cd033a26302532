"""Running the static graphs of a bundle on memory that the KV cache owns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.runtime.binding import BatchInvariance as BatchInvariance
    from edgekv.runtime.cpu import CpuEngine as CpuEngine
    from edgekv.runtime.engine import (
        Engine as Engine,
        EngineType as EngineType,
        find_engines as find_engines,
        make_engine as make_engine,
    )
    from edgekv.runtime.expert_memory import ExpertStats as ExpertStats
    from edgekv.runtime.graph import (
        Row as Row,
        StaticGraph as StaticGraph,
        StepTimes as StepTimes,
        tree_rows as tree_rows,
        whole_texts as whole_texts,
    )
    from edgekv.runtime.htp import HtpEngine as HtpEngine
    from edgekv.runtime.litert import LitertEngine as LitertEngine
    from edgekv.runtime.tflite import TfliteEngine as TfliteEngine

__getattr__, __all__ = lazy(__name__, __file__)
