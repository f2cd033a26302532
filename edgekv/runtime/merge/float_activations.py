"""A pass: activations stay float from one operation to the next."""

from __future__ import annotations

import onnx_ir as ir

from edgekv.runtime.rewrite import parameters, readers, remove_unused

_Parameters = tuple[ir.Value, ir.Value]


class FloatActivations(ir.passes.InPlacePass):
    """Drops the requantization of activations: a tensor that is quantized and dequantized again stays float.

    Inputs and outputs of the graph keep their integers. So do keys and values: attention reads the new rows as the
    cache stores them.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        cached = _cache_encodings(graph)
        modified = [node for node in graph if _drop(node, cached)]
        modified += [node for node in graph if _gather_integers(graph, node)]
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, bool(modified))


def _cache_encodings(graph: ir.Graph) -> set[_Parameters]:
    """The encodings of the inputs that are past keys and values."""
    past = [value for value in graph.inputs if str(value.name).startswith("past_")]
    return {found for value in past for node in readers(value) if (found := parameters(node)) is not None}


def _drop(node: ir.Node, cached: set[_Parameters]) -> bool:
    """Let the readers of a dequantized tensor read what was quantized."""
    encoding = parameters(node)
    if node.op_type != "DequantizeLinear" or encoding is None or encoding in cached:
        return False
    quantizer = node.inputs[0].producer() if node.inputs[0] is not None else None
    if quantizer is None or quantizer.op_type != "QuantizeLinear" or parameters(quantizer) != encoding:
        return False
    source = quantizer.inputs[0]
    if quantizer.outputs[0].is_graph_output() or source is None:
        return False
    node.outputs[0].replace_all_uses_with(source)
    return True


def _gather_integers(graph: ir.Graph, node: ir.Node) -> bool:
    """Dequantize the gathered rows of a constant table instead of all of it."""
    table = node.inputs[0].producer() if node.op_type == "Gather" and node.inputs[0] is not None else None
    if table is None or table.op_type != "DequantizeLinear" or parameters(table) is None:
        return False
    integers = table.inputs[0]
    if integers is None or integers.const_value is None:
        return False
    rows = ir.Node("", "Gather", [integers, node.inputs[1]], node.attributes.values(), name=f"{node.name}_integers")
    rows.outputs[0].name = f"{node.outputs[0].name}_integers"
    floats = ir.Node("", "DequantizeLinear", [rows.outputs[0], *table.inputs[1:]], name=f"{node.name}_floats")
    floats.outputs[0].name = f"{node.outputs[0].name}_floats"
    graph.insert_before(node, [rows, floats])
    node.outputs[0].replace_all_uses_with(floats.outputs[0])
    return True
