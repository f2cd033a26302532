"""Numbers only: encodings, ranges and integer weights, without graphs, files or devices."""

from quant.encoding import DTYPES as DTYPES, Dtype as Dtype, Encoding as Encoding
from quant.inputs import LayerInputs as LayerInputs
from quant.ranges import LARGEST as LARGEST, Range as Range
from quant.rescale import rescale as rescale
from quant.rounding import (
    FITTED as FITTED,
    Method as Method,
    quantize as quantize,
    quantize_per_channel as quantize_per_channel,
)
from quant.weights import (
    WEIGHT_TYPES as WEIGHT_TYPES,
    Grid as Grid,
    QuantizedWeight as QuantizedWeight,
    WeightDtype as WeightDtype,
    WeightType as WeightType,
    pack_int4 as pack_int4,
    unpack_int4 as unpack_int4,
)
