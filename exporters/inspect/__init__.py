"""Quality reports: a bundle against its float32 reference, as a whole, per layer and per tensor."""

from exporters.inspect.divergence import (
    Divergence as Divergence,
    find_divergence as find_divergence,
    sqnr_db as sqnr_db,
)
from exporters.inspect.layers import measure_layers as measure_layers
from exporters.inspect.probe import Probe as Probe
from exporters.inspect.propose import (
    Promotion as Promotion,
    Proposal as Proposal,
    parse_budget as parse_budget,
    propose as propose,
)
from exporters.inspect.report import LayersReport as LayersReport, TensorLoss as TensorLoss
from exporters.inspect.show import layer_lines as layer_lines, proposal_lines as proposal_lines
from exporters.inspect.trace import (
    Trace as Trace,
    read_trace as read_trace,
    trace_reference as trace_reference,
    write_trace as write_trace,
)
