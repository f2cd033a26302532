"""Plans: whether a model fits, how fast it can be, and the cost of its export, from sizes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.plan.estimate import Estimate as Estimate, GraphEstimate as GraphEstimate
    from edgekv.plan.export_cost import (
        ExportCost as ExportCost,
        calibration_window as calibration_window,
        default_calibration_tokens as default_calibration_tokens,
        graph_bytes as graph_bytes,
        graphs_bytes as graphs_bytes,
        layer_graph_bytes as layer_graph_bytes,
        quantization_bytes as quantization_bytes,
        window_bytes as window_bytes,
        writing_bytes as writing_bytes,
    )
    from edgekv.plan.fit import (
        MASK_BYTES as MASK_BYTES,
        Demand as Demand,
        Fit as Fit,
        MemoryLimit as MemoryLimit,
        activation_bytes as activation_bytes,
        mask_bytes as mask_bytes,
        mask_warnings as mask_warnings,
    )
    from edgekv.plan.options import (
        DEFAULT_AR as DEFAULT_AR,
        DEFAULT_CONTEXT as DEFAULT_CONTEXT,
        DEFAULT_KEY_LAYOUT as DEFAULT_KEY_LAYOUT,
        DEFAULT_RECIPE as DEFAULT_RECIPE,
        HTP_CONTEXT_BYTES as HTP_CONTEXT_BYTES,
        MAX_CONTEXT as MAX_CONTEXT,
        PROTOBUF_BYTES as PROTOBUF_BYTES,
        Overrides as Overrides,
        PlanOptions as PlanOptions,
    )
    from edgekv.plan.parts import (
        COMPILE_BYTES as COMPILE_BYTES,
        EncoderPlan as EncoderPlan,
        Load as Load,
        Part as Part,
        compile_bytes as compile_bytes,
        divide as divide,
        lay_out as lay_out,
        min_splits as min_splits,
    )
    from edgekv.plan.plan import RECIPES as RECIPES, Plan as Plan, make_plan as make_plan
    from edgekv.plan.size import (
        SizeReport as SizeReport,
        check_plot as check_plot,
        make_size_report as make_size_report,
        save_plot as save_plot,
    )
    from edgekv.plan.speed import (
        VERIFY_ROWS as VERIFY_ROWS,
        FirstToken as FirstToken,
        SpeculativeSpeed as SpeculativeSpeed,
        Speed as Speed,
        estimate_speed as estimate_speed,
    )
    from edgekv.plan.subject import (
        Subject as Subject,
        check_kernel as check_kernel,
        checked_ar as checked_ar,
        find_subject as find_subject,
    )

__getattr__, __all__ = lazy(__name__, __file__)
