"""What a cache costs before anything is exported: bytes held and copied, graph inputs and outputs, what fits."""

from edgekv.size.memory import estimate
from edgekv.size.plot import save_plot
from edgekv.size.recommend import Recommendation
from edgekv.size.report import Report, make_report
from edgekv.size.source import find_subject, is_bundle
from edgekv.size.strategies import CHOICES, Choice, StrategySize
from edgekv.size.subject import Overrides, Subject, kv_dtype_of
from edgekv.size.traffic import Traffic, count_windows, measure_traffic
from edgekv.size.verdict import HTP_CONTEXT_BYTES, Budget, Verdict, check_cache_type, largest_multiple
from edgekv.size.weights import WEIGHT_DTYPES, Decoder, Weights, matrix_bytes, packed_matrix_bytes, recipe_weights

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
    "matrix_bytes",
    "measure_traffic",
    "packed_matrix_bytes",
    "save_plot",
    "recipe_weights",
    "WEIGHT_DTYPES",
]
