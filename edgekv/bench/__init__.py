"""Speed of a bundle, as llama-bench measures it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.lazy import lazy

if TYPE_CHECKING:
    from edgekv.bench.measure import default_plan, run_bench
    from edgekv.bench.plan import DEFAULT_NEW_TOKENS, DEFAULT_PROMPT_TOKENS, BenchPlan
    from edgekv.bench.report import BenchReport, FirstToken, Speed, VerifyPass

__all__ = [
    "DEFAULT_NEW_TOKENS",
    "DEFAULT_PROMPT_TOKENS",
    "BenchPlan",
    "BenchReport",
    "FirstToken",
    "Speed",
    "VerifyPass",
    "default_plan",
    "run_bench",
]

__getattr__ = lazy(
    __name__,
    {
        "measure": "default_plan run_bench",
        "plan": "BenchPlan DEFAULT_NEW_TOKENS DEFAULT_PROMPT_TOKENS",
        "report": "BenchReport FirstToken Speed VerifyPass",
    },
)
