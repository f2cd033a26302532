"""Speed of a bundle, as llama-bench measures it."""

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
