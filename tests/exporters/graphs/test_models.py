"""Small ONNX graphs made in memory."""

from __future__ import annotations

import onnx_ir as ir

from exporters.graphs.models import (
    NodeWriter,
    encoding,
)
from quant import Encoding

HEAD = '<ir_version: 10, opset_import: ["": 21]>'


def _model(text: str) -> ir.Model:
    return ir.from_onnx_text(f"{HEAD} {text}")


def test_a_constant_is_written_once_and_a_result_has_its_name() -> None:
    model = _model("agraph (float[2] x) => (float[2] y) { y = Tanh(x) }")
    writer = NodeWriter(model.graph)
    first = writer.requantize(model.graph.inputs[0], "a", Encoding("u8", 0.5, 128))
    writer.requantize(first, "b", Encoding("u8", 0.5, 128))
    assert sorted(model.graph.initializers) == ["s0.5", "u8_128"]
    assert [node.outputs[0].name for node in writer.nodes] == ["a_q", "a", "b_q", "b"]
    assert [encoding(node) for node in writer.nodes] == [Encoding("u8", 0.5, 128)] * 4
