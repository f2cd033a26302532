"""The smallest graphs that show whether a runtime works."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

OPSET, IR_VERSION = 23, 11
"""Versions of the exported graphs: an older onnxruntime loads neither."""

_WIDTH = 64
_ZERO_POINT = 32768
_FLOAT, _UINT16 = 1, 4  # TensorProto.DataType


def write_onnx_norm(path: Path) -> None:
    """An ONNX graph of one RMS norm between uint16 activations, as exported graphs have them.

    Written field by field: the package onnx is not among the requirements of the CPU engine.
    """
    weights = [round((channel + 1) / 128 * 2**15) for channel in range(_WIDTH)]
    constants = [
        _constant("scale", _FLOAT, [], struct.pack("<f", 2.0**-15)),
        _constant("zero", _UINT16, [], struct.pack("<H", _ZERO_POINT)),
        _constant("weights", _UINT16, [_WIDTH], struct.pack(f"<{_WIDTH}H", *weights)),
        _constant("none", _UINT16, [], struct.pack("<H", 0)),
    ]
    nodes = [
        _node("DequantizeLinear", ["x", "scale", "zero"], "real"),
        _node("DequantizeLinear", ["weights", "scale", "none"], "real_weights"),
        _node("RMSNormalization", ["real", "real_weights"], "norm", _epsilon(1e-6)),
        _node("QuantizeLinear", ["norm", "scale", "zero"], "y"),
    ]
    graph = b"".join(
        [
            *(_field(1, node) for node in nodes),
            _field(2, b"norm"),
            *(_field(5, constant) for constant in constants),
            _field(11, _port("x")),
            _field(12, _port("y")),
        ]
    )
    opset = _field(1, b"") + _field(2, OPSET)
    path.write_bytes(_field(1, IR_VERSION) + _field(7, graph) + _field(8, opset))


def _node(op: str, inputs: list[str], output: str, attribute: bytes = b"") -> bytes:
    """A NodeProto; an RMSNormalization is over the last axis unless it says otherwise."""
    named = b"".join(_field(1, name.encode()) for name in inputs) + _field(2, output.encode())
    return named + _field(4, op.encode()) + (_field(5, attribute) if attribute else b"")


def _epsilon(value: float) -> bytes:
    """An AttributeProto of type FLOAT (1)."""
    return _field(1, b"epsilon") + b"\x15" + struct.pack("<f", value) + _field(20, 1)


def _constant(name: str, dtype: int, shape: list[int], raw: bytes) -> bytes:
    """A TensorProto."""
    return b"".join(_field(1, size) for size in shape) + _field(2, dtype) + _field(8, name.encode()) + _field(9, raw)


def _port(name: str) -> bytes:
    """A ValueInfoProto of a tensor uint16 [1, _WIDTH]."""
    shape = b"".join(_field(1, _field(1, size)) for size in (1, _WIDTH))
    return _field(1, name.encode()) + _field(2, _field(1, _field(1, _UINT16) + _field(2, shape)))


def _field(number: int, value: int | bytes) -> bytes:
    """A field of a protocol buffer: an integer, or bytes with their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; all bytes but the last have the highest bit."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def onnx_norm_case() -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """An input of that graph, [1, 64], and its output: +-0.5 has the RMS 0.5, so that +-1 times the weights remains."""
    signs = np.where(np.arange(_WIDTH) % 2, -1, 1)
    x = _ZERO_POINT + 2**14 * signs
    y = _ZERO_POINT + 2**8 * (np.arange(_WIDTH) + 1) * signs
    return x[None].astype(np.uint16), y[None].astype(np.uint16)


def tflite_model() -> bytes:
    """A TFLite model of one subgraph without operators (schema version 3).

    Written by hand, because tflite-runtime does not depend on a package that writes FlatBuffers. Every offset is
    relative to its own position; a table points back to the list of its fields.
    """
    root, model_fields, model, nothing, subgraphs, subgraph_fields, subgraph, end = 0, 8, 24, 44, 52, 60, 76, 96
    parts = [
        (root, struct.pack("<I4s", model - root, b"TFL3")),
        # version, operator_codes, subgraphs, no description, buffers
        (model_fields, struct.pack("<7H", 14, 20, 4, 8, 12, 0, 16)),
        (model, struct.pack("<iI", model - model_fields, 3)),
        (model + 8, struct.pack("<3I", nothing - (model + 8), subgraphs - (model + 12), nothing - (model + 16))),
        (nothing, struct.pack("<I", 0)),
        (subgraphs, struct.pack("<2I", 1, subgraph - (subgraphs + 4))),
        # tensors, inputs, outputs, operators: all empty
        (subgraph_fields, struct.pack("<6H", 12, 20, 4, 8, 12, 16)),
        (subgraph, struct.pack("<i4I", subgraph - subgraph_fields, *(end - (subgraph + at) for at in (4, 8, 12, 16)))),
        (end, struct.pack("<I", 0)),
    ]
    raw = bytearray(end + 4)
    for at, part in parts:
        raw[at : at + len(part)] = part
    return bytes(raw)
