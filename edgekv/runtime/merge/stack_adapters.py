"""A pass: parts of adapters that are read as one stack are one input."""

from __future__ import annotations

import onnx_ir as ir

from edgekv.runtime.rewrite import readers, remove_unused, sizes
from edgekv.spec import LORA_PREFIX, STACK


class StackAdapters(ir.passes.InPlacePass):
    """Replaces inputs for adapters that are only concatenated along the first axis by one input, named after them all.

    The host stacks them once for each adapter; the graph would copy them in every step.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        modified = [node for node in [*graph] if _stack(graph, node)]
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, bool(modified))


def _stack(graph: ir.Graph, node: ir.Node) -> bool:
    if node.op_type != "Concat" or node.attributes.get_int("axis", 0) != 0:
        return False
    parts = [value for value in node.inputs if value is not None and _is_part(value)]
    if len(parts) < len(node.inputs):
        return False
    stack = ir.Value(name=STACK.join(str(value.name) for value in parts))
    stack.type, stack.shape = parts[0].type, ir.Shape([len(parts), *sizes(parts[0])[1:]])
    node.outputs[0].replace_all_uses_with(stack)
    for index in range(len(parts)):
        node.replace_input_with(index, None)
    graph.remove(node)
    place = min(graph.inputs.index(value) for value in parts)
    for value in parts:
        graph.inputs.remove(value)
    graph.inputs.insert(place, stack)
    return True


def _is_part(value: ir.Value) -> bool:
    """Whether a value is an input for an adapter's part, `[1, ...]`, that nothing else reads."""
    if not value.is_graph_input() or not str(value.name).startswith(LORA_PREFIX):
        return False
    left = [node for node in readers(value) if node.graph is not None]  # merged nodes stay registered as readers
    return sizes(value)[0] == 1 and len(left) == 1
