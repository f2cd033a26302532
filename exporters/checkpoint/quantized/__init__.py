"""Quantized Hugging Face checkpoints: GPTQ, AWQ, compressed-tensors and float8, read without torch."""

from exporters.checkpoint.quantized.matrix import CarryCost, QuantizedMatrix, Storage
from exporters.checkpoint.quantized.packed import IntegerMatrix
from exporters.checkpoint.quantized.quantization import Quantization, read_quantization

__all__ = ["CarryCost", "IntegerMatrix", "Quantization", "QuantizedMatrix", "Storage", "read_quantization"]
