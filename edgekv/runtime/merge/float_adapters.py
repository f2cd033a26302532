"""A pass: inputs for adapters are float32, dequantized once by the host."""

from __future__ import annotations

import onnx_ir as ir

from edgekv.runtime.rewrite import parameters, readers, remove_unused
from edgekv.spec import LORA_PREFIX


class FloatAdapters(ir.passes.InPlacePass):
    """Replaces each input for adapters that is only dequantized by its float values: the same bits, once per adapter.

    An adapter has more elements than a step has activations, so dequantizing them in every step would cost more than
    multiplying by them.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = [value for value in model.graph.inputs if _read_floats(value)]
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, bool(modified))


def _read_floats(value: ir.Value) -> bool:
    nodes = readers(value)
    if not str(value.name).startswith(LORA_PREFIX) or not nodes:
        return False
    if any(node.op_type != "DequantizeLinear" or parameters(node) is None for node in nodes):
        return False
    value.type = ir.TensorType(ir.DataType.FLOAT)
    for node in nodes:
        node.outputs[0].replace_all_uses_with(value)
    return True
