"""The graph-rewriting helper, and the passes that are not tied to one runtime."""

from __future__ import annotations

import onnx_ir as ir

from edgekv.runtime.rewrite import (
    NodeWriter,
    encoding,
    remove_unused,
)
from quant import Encoding

HEAD = '<ir_version: 10, opset_import: ["": 21]>'


def _model(text: str) -> ir.Model:
    return ir.from_onnx_text(f"{HEAD} {text}")


def test_a_constant_is_written_once_and_a_node_is_called_after_its_result() -> None:
    model = _model("agraph (float[2] x) => (float[2] y) { y = Tanh(x) }")
    writer = NodeWriter(model.graph)
    first = writer.requantize(model.graph.inputs[0], "a", Encoding("u8", 0.5, 128))
    writer.requantize(first, "b", Encoding("u8", 0.5, 128))
    assert sorted(model.graph.initializers) == ["scale_0.5", "zero_u8_128"]
    assert [node.name for node in writer.nodes] == ["a_q_node", "a_node", "b_q_node", "b_node"]
    assert [encoding(node) for node in writer.nodes] == [Encoding("u8", 0.5, 128)] * 4


def test_what_no_output_depends_on_is_removed() -> None:
    model = _model(
        "agraph (float[2] x) => (float[2] y) <float[2] c = {1, 2}, float[2] d = {3, 4}>"
        " { a = Add(x, c)  b = Tanh(a)  y = Add(x, d) }"
    )
    remove_unused(model)
    assert [node.op_type for node in model.graph] == ["Add"]
    assert list(model.graph.initializers) == ["d"]
