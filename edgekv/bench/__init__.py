"""Speed of a bundle, as llama-bench measures it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.bench.measure import default_plan as default_plan, run_bench as run_bench
    from edgekv.bench.plan import (
        DEFAULT_NEW_TOKENS as DEFAULT_NEW_TOKENS,
        DEFAULT_PROMPT_TOKENS as DEFAULT_PROMPT_TOKENS,
        BenchPlan as BenchPlan,
    )
    from edgekv.bench.report import (
        BenchReport as BenchReport,
        FirstToken as FirstToken,
        Speed as Speed,
        VerifyPass as VerifyPass,
    )

__getattr__, __all__ = lazy(__name__, __file__)
