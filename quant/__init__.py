"""Numbers only: encodings, ranges and integer weights. Knows nothing of graphs, files or devices."""

from quant.encoding import DTYPES, Dtype, Encoding
from quant.ranges import Range
from quant.weights import QuantizedWeight, quantize_per_channel

__all__ = ["DTYPES", "Dtype", "Encoding", "QuantizedWeight", "Range", "quantize_per_channel"]
