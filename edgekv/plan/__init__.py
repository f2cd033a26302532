"""Will it fit, how fast could it be, and what does the export take: answers from a `config.json` alone."""

from edgekv.plan.activations import activation_bytes
from edgekv.plan.compiling import COMPILE_BYTES, compile_bytes
from edgekv.plan.cost import (
    CALIBRATION_WINDOW,
    ExportCost,
    default_calibration_tokens,
    export_cost,
    graph_bytes,
    layer_graph_bytes,
    quantization_bytes,
    writing_bytes,
)
from edgekv.plan.parts import PROTOBUF_BYTES, Load, Part, divide, lay_out, least_splits
from edgekv.plan.report import RECIPES, Plan, make_plan
from edgekv.plan.roofline import Roofline, roofline
from edgekv.plan.verdict import Demand, PlanVerdict

__all__ = [
    "CALIBRATION_WINDOW",
    "COMPILE_BYTES",
    "default_calibration_tokens",
    "quantization_bytes",
    "writing_bytes",
    "PROTOBUF_BYTES",
    "RECIPES",
    "Demand",
    "ExportCost",
    "Load",
    "Part",
    "Plan",
    "PlanVerdict",
    "Roofline",
    "activation_bytes",
    "compile_bytes",
    "divide",
    "export_cost",
    "graph_bytes",
    "lay_out",
    "layer_graph_bytes",
    "least_splits",
    "make_plan",
    "roofline",
]
