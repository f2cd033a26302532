"""Plans: whether a model fits, how fast it can be, and the cost of its export, from sizes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.lazy import lazy

if TYPE_CHECKING:
    from edgekv.plan.activations import activation_bytes
    from edgekv.plan.compiling import COMPILE_BYTES, compile_bytes
    from edgekv.plan.encoder import EncoderPlan
    from edgekv.plan.estimate import Estimate, GraphEstimate
    from edgekv.plan.export_cost import (
        ExportCost,
        calibration_window,
        default_calibration_tokens,
        graph_bytes,
        graphs_bytes,
        layer_graph_bytes,
        quantization_bytes,
        writing_bytes,
    )
    from edgekv.plan.fit import Demand, Fit, MemoryLimit
    from edgekv.plan.limits import HTP_CONTEXT_BYTES, MOST_CONTEXT, PROTOBUF_BYTES
    from edgekv.plan.masks import MASK_BYTES, mask_bytes, mask_warnings
    from edgekv.plan.options import DEFAULT_AR, DEFAULT_CONTEXT, Overrides
    from edgekv.plan.parts import Load, Part, divide, lay_out, least_splits
    from edgekv.plan.plan import RECIPES, Plan, make_plan
    from edgekv.plan.plot import save_plot
    from edgekv.plan.size import SizeReport, make_size_report
    from edgekv.plan.source import find_subject
    from edgekv.plan.speculation import VERIFY_ROWS, SpeculativeSpeed
    from edgekv.plan.speed import FirstToken, Speed, estimate_speed
    from edgekv.plan.subject import Subject, check_kernel, checked_ar

__all__ = [
    "COMPILE_BYTES",
    "DEFAULT_AR",
    "DEFAULT_CONTEXT",
    "HTP_CONTEXT_BYTES",
    "MASK_BYTES",
    "MOST_CONTEXT",
    "PROTOBUF_BYTES",
    "RECIPES",
    "Demand",
    "EncoderPlan",
    "Estimate",
    "ExportCost",
    "FirstToken",
    "Fit",
    "GraphEstimate",
    "Load",
    "MemoryLimit",
    "Overrides",
    "Part",
    "Plan",
    "SizeReport",
    "SpeculativeSpeed",
    "Speed",
    "Subject",
    "VERIFY_ROWS",
    "activation_bytes",
    "check_kernel",
    "checked_ar",
    "compile_bytes",
    "calibration_window",
    "default_calibration_tokens",
    "divide",
    "estimate_speed",
    "find_subject",
    "graph_bytes",
    "graphs_bytes",
    "lay_out",
    "layer_graph_bytes",
    "least_splits",
    "make_plan",
    "make_size_report",
    "mask_bytes",
    "mask_warnings",
    "quantization_bytes",
    "save_plot",
    "writing_bytes",
]

__getattr__ = lazy(
    __name__,
    {
        "activations": "activation_bytes",
        "compiling": "COMPILE_BYTES compile_bytes",
        "encoder": "EncoderPlan",
        "estimate": "Estimate GraphEstimate",
        "export_cost": "ExportCost calibration_window default_calibration_tokens graph_bytes "
        "graphs_bytes layer_graph_bytes quantization_bytes writing_bytes",
        "fit": "Demand Fit MemoryLimit",
        "limits": "HTP_CONTEXT_BYTES MOST_CONTEXT PROTOBUF_BYTES",
        "masks": "MASK_BYTES mask_bytes mask_warnings",
        "parts": "Load Part divide lay_out least_splits",
        "plan": "Plan RECIPES make_plan",
        "plot": "save_plot",
        "size": "SizeReport make_size_report",
        "source": "find_subject",
        "speculation": "SpeculativeSpeed VERIFY_ROWS",
        "speed": "FirstToken Speed estimate_speed",
        "options": "DEFAULT_AR DEFAULT_CONTEXT Overrides",
        "subject": "Subject check_kernel checked_ar",
    },
)
