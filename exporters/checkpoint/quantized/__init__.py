"""Quantized Hugging Face checkpoints: GPTQ, AWQ, compressed-tensors and float8, read without torch."""

from exporters.checkpoint.quantized.matrix import (
    CarryCost as CarryCost,
    QuantizedMatrix as QuantizedMatrix,
    Storage as Storage,
)
from exporters.checkpoint.quantized.packed import IntegerMatrix as IntegerMatrix
from exporters.checkpoint.quantized.quantization import (
    Quantization as Quantization,
    read_quantization as read_quantization,
)
