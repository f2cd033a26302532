"""A pass: inputs for adapters are uint16, the only 16-bit integers that Genie writes into LoRA inputs."""

from __future__ import annotations

import onnx_ir as ir

from edgekv.runtime.rewrite import NodeWriter, encoding, readers, unlike
from edgekv.spec import LORA_PREFIX
from quant import Encoding

UNSIGNED_ZERO = 32768


def unsigned(signed: Encoding) -> Encoding:
    """The uint16 encoding whose integers are those of an int16 encoding plus `UNSIGNED_ZERO`."""
    return Encoding("u16", signed.scale, signed.zero_point + UNSIGNED_ZERO)


class UnsignedAdapters(ir.passes.InPlacePass):
    """Lets a graph read each adapter input as uint16 and subtract `UNSIGNED_ZERO` first: the same int16 as before."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Raises: BundleError: an input for adapters is not dequantized first."""
        found = [value for value in model.graph.inputs if str(value.name).startswith(LORA_PREFIX)]
        for value in found:
            _read_unsigned(model.graph, value)
        return ir.passes.PassResult(model, bool(found))


def _read_unsigned(graph: ir.Graph, value: ir.Value) -> None:
    # value -> Dequantize (uint16) -> Quantize (int16) -> Dequantize, as before
    nodes = readers(value)
    signed = encoding(nodes[0]) if nodes else None
    if signed is None or any(encoding(node) != signed for node in nodes):
        raise unlike(graph, f"{value.name}, which is not dequantized first")
    writer = NodeWriter(graph)
    exact = writer.dequantize(value, f"{value.name}.unsigned", unsigned(signed))
    integers = writer.quantize(exact, f"{value.name}.signed", signed)
    value.type = ir.TensorType(ir.DataType.UINT16)
    graph.insert_before(nodes[0], writer.nodes)
    for node in nodes:
        node.replace_input_with(0, integers)
