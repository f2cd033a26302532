"""Speed of a bundle, as llama-bench measures it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.bench.measure import default_plan as default_plan
    from edgekv.bench.measure import run_bench as run_bench
    from edgekv.bench.plan import DEFAULT_NEW_TOKENS as DEFAULT_NEW_TOKENS
    from edgekv.bench.plan import DEFAULT_PROMPT_TOKENS as DEFAULT_PROMPT_TOKENS
    from edgekv.bench.plan import BenchPlan as BenchPlan
    from edgekv.bench.report import BenchReport as BenchReport
    from edgekv.bench.report import FirstToken as FirstToken
    from edgekv.bench.report import Speed as Speed
    from edgekv.bench.report import VerifyPass as VerifyPass

__getattr__, __all__ = lazy(__name__, __file__)
