"""A pass: move integers instead of floats."""

from __future__ import annotations

import onnx_ir as ir

from edgekv.runtime.rewrite import parameters, readers, remove_unused

_MOVED_INPUTS = {"Concat": None, "Gather": 1, "Reshape": 1, "Split": 1, "Transpose": 1}
"""Operations that only move elements, and how many of their inputs they move; None for all."""


class MoveIntegers(ir.passes.InPlacePass):
    """Lets operations that only move elements work on the integers around them, if one encoding applies throughout.

    A tensor that is dequantized, moved, and quantized again with the same scale and zero point is the moved integers:
    the rounding of float32 is far below half a step of 16 bits.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = [node for node in model.graph if _move(node)]
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, bool(modified))


def _move(node: ir.Node) -> bool:
    """Connect the node to the integers before and after it; False, with nothing changed, if that is not the same."""
    if node.op_type not in _MOVED_INPUTS or any(value.is_graph_output() for value in node.outputs):
        return False
    count = _MOVED_INPUTS[node.op_type] or len(node.inputs)
    sources = [value.producer() for value in node.inputs[:count] if value is not None]
    targets = [reader for value in node.outputs for reader in readers(value)]
    if len(targets) != len(node.outputs) or any(len(readers(value)) != 1 for value in node.outputs):
        return False
    if any(each is None or each.op_type != "DequantizeLinear" for each in sources):
        return False
    if any(each.op_type != "QuantizeLinear" for each in targets):
        return False
    encodings = {parameters(each) for each in (*sources, *targets) if each is not None}
    if len(encodings) != 1 or None in encodings:
        return False
    for index, source in enumerate(sources):
        node.replace_input_with(index, source.inputs[0] if source else None)
    for value, target in zip(node.outputs, targets, strict=True):
        integers = target.outputs[0]
        value.name, value.type, value.shape = integers.name, integers.type, integers.shape
        integers.replace_all_uses_with(value, replace_graph_outputs=True)
    return True
