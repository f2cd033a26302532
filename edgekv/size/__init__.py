"""What a cache costs before anything is exported: bytes held and copied, graph inputs and outputs, what fits."""

from edgekv.size.report import Report, make_report
from edgekv.size.source import find_subject
from edgekv.size.strategies import CHOICES, Choice, StrategySize
from edgekv.size.subject import Overrides, Subject, kv_dtype_of
from edgekv.size.traffic import Traffic, measure_traffic
from edgekv.size.verdict import HTP_CONTEXT_BYTES, Budget, Verdict

__all__ = [
    "CHOICES",
    "HTP_CONTEXT_BYTES",
    "Budget",
    "Choice",
    "Overrides",
    "Report",
    "StrategySize",
    "Subject",
    "Traffic",
    "Verdict",
    "find_subject",
    "kv_dtype_of",
    "make_report",
    "measure_traffic",
]
