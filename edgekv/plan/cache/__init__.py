"""What a cache costs before anything is exported: bytes held and copied, graph inputs and outputs, what fits."""

from edgekv.plan.cache.memory import estimate
from edgekv.plan.cache.plot import save_plot
from edgekv.plan.cache.recommend import Recommendation
from edgekv.plan.cache.report import Report, make_report
from edgekv.plan.cache.source import find_subject, is_bundle
from edgekv.plan.cache.strategies import CHOICES, Choice, StrategySize
from edgekv.plan.cache.subject import Overrides, Subject, kv_dtype_of
from edgekv.plan.cache.traffic import Traffic, count_windows, measure_traffic
from edgekv.plan.cache.verdict import HTP_CONTEXT_BYTES, Budget, Verdict, check_cache_type, largest_multiple
from edgekv.spec.sizes import WEIGHT_DTYPES, Decoder, Weights, recipe_weights

__all__ = [
    "CHOICES",
    "HTP_CONTEXT_BYTES",
    "Budget",
    "Choice",
    "Decoder",
    "Overrides",
    "Recommendation",
    "Report",
    "StrategySize",
    "Subject",
    "Traffic",
    "Verdict",
    "Weights",
    "check_cache_type",
    "count_windows",
    "estimate",
    "find_subject",
    "is_bundle",
    "kv_dtype_of",
    "largest_multiple",
    "make_report",
    "measure_traffic",
    "save_plot",
    "recipe_weights",
    "WEIGHT_DTYPES",
]
