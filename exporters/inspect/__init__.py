"""Quality reports: a bundle against its float32 reference, as a whole, per layer and per tensor."""

from exporters.inspect.divergence import Divergence, find_divergence, sqnr_db
from exporters.inspect.layers import measure_layers
from exporters.inspect.probe import Probe
from exporters.inspect.propose import Promotion, Proposal, parse_budget, propose
from exporters.inspect.report import LayersReport, TensorLoss
from exporters.inspect.show import layer_lines, proposal_lines
from exporters.inspect.trace import Trace, read_trace, trace_reference, write_trace

__all__ = [
    "Divergence",
    "LayersReport",
    "Probe",
    "Promotion",
    "Proposal",
    "TensorLoss",
    "Trace",
    "find_divergence",
    "layer_lines",
    "measure_layers",
    "parse_budget",
    "proposal_lines",
    "propose",
    "read_trace",
    "sqnr_db",
    "trace_reference",
    "write_trace",
]
