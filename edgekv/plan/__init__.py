"""Will it fit, how fast could it be, and what does the export take: answers from a `config.json` alone."""

from edgekv.plan.activations import activation_bytes
from edgekv.plan.cost import ExportCost, export_cost, graph_bytes
from edgekv.plan.parts import Part, pack
from edgekv.plan.report import RECIPES, Plan, make_plan
from edgekv.plan.roofline import Roofline, roofline
from edgekv.plan.verdict import PROTOBUF_BYTES, Demand, PlanVerdict

__all__ = [
    "PROTOBUF_BYTES",
    "RECIPES",
    "Demand",
    "ExportCost",
    "Part",
    "Plan",
    "PlanVerdict",
    "Roofline",
    "activation_bytes",
    "export_cost",
    "graph_bytes",
    "make_plan",
    "pack",
    "roofline",
]
