"""Where quality went: every result beside that of the float reference, and what a difference looks like."""

from exporters.diagnose.divergence import Divergence, find_divergence, sqnr_db
from exporters.diagnose.probe import Probe
from exporters.diagnose.trace import Trace, read_trace, trace_reference, write_trace

__all__ = ["Divergence", "Probe", "Trace", "find_divergence", "read_trace", "sqnr_db", "trace_reference", "write_trace"]
