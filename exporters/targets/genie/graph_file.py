"""Reading the inputs and outputs of an ONNX graph with the encodings that its first and last nodes give them."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import numpy_helper

from exporters.targets.genie.ports import GeniePort, GeniePorts
from quant import DTYPES, Dtype, Encoding

_DTYPES: dict[str, Dtype] = {dtype.name: name for name, dtype in DTYPES.items()}


def read_ports(path: Path) -> GeniePorts:
    """The ports of a graph whose integers are dequantized by the first node and quantized by the last one."""
    graph = onnx.load(path, load_external_data=False).graph
    constants = {each.name: each for each in graph.initializer}
    readers = {node.input[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    writers = {node.output[0]: node for node in graph.node if node.op_type == "QuantizeLinear"}

    def port(value: onnx.ValueInfoProto, at: dict[str, onnx.NodeProto]) -> GeniePort:
        shape = tuple(each.dim_value for each in value.type.tensor_type.shape.dim)
        node = at.get(value.name)
        if node is None:
            return GeniePort.of(value.name, shape, None)
        scale, zero = (numpy_helper.to_array(constants[name]) for name in node.input[1:3])
        return GeniePort.of(value.name, shape, Encoding(_DTYPES[zero.dtype.name], float(scale), int(zero)))

    return GeniePorts(
        tuple(port(each, readers) for each in graph.input), tuple(port(each, writers) for each in graph.output)
    )
