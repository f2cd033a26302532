"""Plans: whether a model fits, how fast it can be, and the cost of its export, from sizes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.plan.activations import activation_bytes as activation_bytes
    from edgekv.plan.compiling import COMPILE_BYTES as COMPILE_BYTES
    from edgekv.plan.compiling import compile_bytes as compile_bytes
    from edgekv.plan.encoder import EncoderPlan as EncoderPlan
    from edgekv.plan.estimate import Estimate as Estimate
    from edgekv.plan.estimate import GraphEstimate as GraphEstimate
    from edgekv.plan.export_cost import ExportCost as ExportCost
    from edgekv.plan.export_cost import calibration_window as calibration_window
    from edgekv.plan.export_cost import default_calibration_tokens as default_calibration_tokens
    from edgekv.plan.export_cost import graph_bytes as graph_bytes
    from edgekv.plan.export_cost import graphs_bytes as graphs_bytes
    from edgekv.plan.export_cost import layer_graph_bytes as layer_graph_bytes
    from edgekv.plan.export_cost import quantization_bytes as quantization_bytes
    from edgekv.plan.export_cost import writing_bytes as writing_bytes
    from edgekv.plan.fit import Demand as Demand
    from edgekv.plan.fit import Fit as Fit
    from edgekv.plan.fit import MemoryLimit as MemoryLimit
    from edgekv.plan.limits import HTP_CONTEXT_BYTES as HTP_CONTEXT_BYTES
    from edgekv.plan.limits import MOST_CONTEXT as MOST_CONTEXT
    from edgekv.plan.limits import PROTOBUF_BYTES as PROTOBUF_BYTES
    from edgekv.plan.masks import MASK_BYTES as MASK_BYTES
    from edgekv.plan.masks import mask_bytes as mask_bytes
    from edgekv.plan.masks import mask_warnings as mask_warnings
    from edgekv.plan.options import DEFAULT_AR as DEFAULT_AR
    from edgekv.plan.options import DEFAULT_CONTEXT as DEFAULT_CONTEXT
    from edgekv.plan.options import Overrides as Overrides
    from edgekv.plan.parts import Load as Load
    from edgekv.plan.parts import Part as Part
    from edgekv.plan.parts import divide as divide
    from edgekv.plan.parts import lay_out as lay_out
    from edgekv.plan.parts import least_splits as least_splits
    from edgekv.plan.plan import RECIPES as RECIPES
    from edgekv.plan.plan import Plan as Plan
    from edgekv.plan.plan import make_plan as make_plan
    from edgekv.plan.plot import save_plot as save_plot
    from edgekv.plan.size import SizeReport as SizeReport
    from edgekv.plan.size import make_size_report as make_size_report
    from edgekv.plan.source import find_subject as find_subject
    from edgekv.plan.speculation import VERIFY_ROWS as VERIFY_ROWS
    from edgekv.plan.speculation import SpeculativeSpeed as SpeculativeSpeed
    from edgekv.plan.speed import FirstToken as FirstToken
    from edgekv.plan.speed import Speed as Speed
    from edgekv.plan.speed import estimate_speed as estimate_speed
    from edgekv.plan.subject import Subject as Subject
    from edgekv.plan.subject import check_kernel as check_kernel
    from edgekv.plan.subject import checked_ar as checked_ar

__getattr__, __all__ = lazy(__name__, __file__)
