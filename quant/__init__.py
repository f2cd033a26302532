"""Numbers only: encodings, ranges and integer weights, without graphs, files or devices."""

from quant.encoding import DTYPES, Dtype, Encoding
from quant.inputs import LayerInputs
from quant.ranges import LARGEST, Range
from quant.rescale import rescale
from quant.rounding import FITTED, Method, quantize, quantize_per_channel
from quant.weights import (
    WEIGHT_TYPES,
    Grid,
    QuantizedWeight,
    WeightDtype,
    WeightType,
    pack_int4,
    unpack_int4,
)

__all__ = [
    "FITTED",
    "LARGEST",
    "DTYPES",
    "WEIGHT_TYPES",
    "Dtype",
    "Encoding",
    "Grid",
    "LayerInputs",
    "Method",
    "QuantizedWeight",
    "Range",
    "WeightDtype",
    "WeightType",
    "pack_int4",
    "quantize",
    "quantize_per_channel",
    "rescale",
    "unpack_int4",
]
