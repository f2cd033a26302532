"""A pass: the runtime's own operations for norms, rotations and gates."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgekv.runtime.merge.fusing import CONTRIB, Fuser, axis_of, constant_of, made_by, replace, shape_of
from edgekv.runtime.rewrite import readers, remove_unused


class FuseLayers(ir.passes.InPlacePass):
    """Replaces rotary embeddings, SiLU and norms by one node each; needs shapes. Norms include the sum before them."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        fuser = Fuser(graph, "of_layers")
        changed: list[ir.Node] = []
        for rewrite in (_rotate, _gate, _normalize):
            changed += [node for node in [*graph] if rewrite(fuser, node)]
            remove_unused(model)
        if changed:
            graph.opset_imports[CONTRIB] = 1
        return ir.passes.PassResult(model, bool(changed))


def _rotate(fuser: Fuser, node: ir.Node) -> bool:
    """`[x cos - y sin, y cos + x sin]` of the halves x and y of every row, `[heads, 1, AR, D]`."""
    if node.op_type != "Concat" or len(node.inputs) != 2 or axis_of(node, 0) != 3:
        return False
    first, second = made_by(node.inputs[0], "Sub"), made_by(node.inputs[1], "Add")
    if first is None or second is None:
        return False
    products = [made_by(value, "Mul") for value in (*first.inputs, *second.inputs)]
    x_cos, y_sin, y_cos, x_sin = products
    if x_cos is None or y_sin is None or y_cos is None or x_sin is None:
        return False
    (x, cos), (y, sin) = x_cos.inputs, y_sin.inputs
    if [*y_cos.inputs] != [y, cos] or [*x_sin.inputs] != [x, sin]:
        return False
    halves = made_by(x, "Split")
    shape = shape_of(node.outputs[0])
    if halves is None or [*halves.outputs] != [x, y] or len(shape) != 4 or shape_of(x) != shape_of(y):
        return False
    rows, half = shape[2], shape[3] // 2
    if shape_of(cos) != (1, 1, rows, half) or shape_of(sin) != (1, 1, rows, half):
        return False
    zero = fuser.integers([0])  # the first row of the table is that of the first token
    tables = [_table(fuser, each, (rows, half)) for each in (cos, sin)]
    inputs = [halves.inputs[0], zero, *tables]
    rotated = fuser.one(node, "RotaryEmbedding", inputs, shape, CONTRIB, interleaved=0)
    replace(node.outputs[0], rotated)
    return True


def _table(fuser: Fuser, value: ir.Value | None, shape: tuple[int, int]) -> ir.Value:
    """Cosines or sines as a table `[AR, D/2]`, made once."""
    assert value is not None, "a table"
    for node in readers(value):
        if node.op_type == "Reshape" and shape_of(node.outputs[0]) == shape:
            return node.outputs[0]
    producer = value.producer()
    assert producer is not None, "cosines are dequantized"
    after = fuser.reshape(producer, value, shape)
    reshaping = after.producer()
    assert reshaping is not None, "just made"
    fuser.graph.remove(reshaping)
    fuser.graph.insert_after(producer, reshaping)
    return after


def _gate(fuser: Fuser, node: ir.Node) -> bool:
    """`x * sigmoid(x)`."""
    if node.op_type != "Mul":
        return False
    for x, other in (node.inputs, reversed(node.inputs)):
        sigmoid = made_by(other, "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] is x:
            active = fuser.one(node, "QuickGelu", [x], shape_of(node.outputs[0]), CONTRIB, alpha=1.0)
            replace(node.outputs[0], active)
            return True
    return False


def _normalize(fuser: Fuser, node: ir.Node) -> bool:
    """RMS norm, together with the residual's sum if it is of two tensors of the same shape."""
    if node.op_type != "RMSNormalization" or axis_of(node, -1) != len(shape_of(node.outputs[0])) - 1:
        return False
    gamma = _as_float(fuser, node.inputs[1])
    if gamma is None:
        return False
    x, shape = node.inputs[0], shape_of(node.outputs[0])
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    total = made_by(x, "Add")
    if total is not None and shape[:2] == (1, 1) and all(shape_of(each) == shape for each in total.inputs):
        flat = shape[1:]
        parts = [_flat(fuser, total, each, flat) for each in total.inputs]
        results: list[tuple[int, ...]] = [flat, (), (), flat]
        made = fuser.insert(
            total, "SkipSimplifiedLayerNormalization", [*parts, gamma], results, CONTRIB, epsilon=epsilon
        )
        for unused in made[1:3]:
            unused.name = ""
        replace(node.outputs[0], fuser.reshape(total, made[0], shape))
        replace(total.outputs[0], fuser.reshape(total, made[3], shape))
        return True
    norm = fuser.one(node, "SimplifiedLayerNormalization", [x, gamma], shape, axis=-1, epsilon=epsilon, stash_type=1)
    replace(node.outputs[0], norm)
    return True


def _flat(fuser: Fuser, before: ir.Node, value: ir.Value | None, shape: tuple[int, ...]) -> ir.Value:
    """A tensor with three axes instead of four, or the one that it was made from."""
    assert value is not None, "a term"
    source = made_by(value, "Reshape")
    if source is not None and shape_of(source.inputs[0]) == shape and source.inputs[0] is not None:
        return source.inputs[0]
    return fuser.reshape(before, value, shape)


def _as_float(fuser: Fuser, value: ir.Value | None) -> ir.Value | None:
    """A constant that is dequantized, as float."""
    node = made_by(value, "DequantizeLinear")
    if node is None or value is None:
        return value if constant_of(value) is not None else None
    integers, scale, zero = (constant_of(each) for each in (*node.inputs, None)[:3])
    if integers is None or scale is None or zero is None:
        return None
    floats = (integers.astype(np.float32) - zero.astype(np.float32)) * scale
    return fuser.constant(f"{value.name}_float", floats.astype(np.float32))
