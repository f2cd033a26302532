"""A pass: a row is summed in the same order alone and beside other rows."""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from edgekv.runtime.merge.fusing import CONTRIB, Fuser, made_by, replace, shape_of
from edgekv.runtime.rewrite import remove_unused

_INT4 = 4


class AlikeRows(ir.passes.InPlacePass):
    """Avoids products whose rows the runtime sums in another order than those of larger products; needs shapes.

    With this pass a decode step has the bits of a row of a larger step, if both have each token in the same column;
    see `OpenRows`.

    - Queries that share keys become rows of one product, and a query that has keys of its own is multiplied twice:
      a product of attention with one row has an order of its own.
    - An odd row is multiplied twice by 4-bit weights: their kernel takes rows in pairs, and a single one differently.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        fuser = Fuser(model.graph, "alike")
        twins: dict[ir.Value, ir.Value] = {}
        changed = [node for node in [*model.graph] if _widen(fuser, node) or _pair(fuser, node, twins)]
        remove_unused(model)
        return ir.passes.PassResult(model, bool(changed))


def _widen(fuser: Fuser, node: ir.Node) -> bool:
    """Give a product of one row with a tensor that is no weight more rows."""
    left, right = (*node.inputs, None, None)[:2]
    first, second, result = shape_of(left), shape_of(right), shape_of(node.outputs[0])
    if node.op_type not in ("MatMul", "FusedMatMul") or not len(first) == len(second) == 4 or first[2] != 1:
        return False
    assert left is not None and right is not None, "factors"
    if made_by(right, "MatMulIntegerToFloat") is not None:
        return False  # it adds the parts of a row, which is a product of one row in graphs of every AR
    groups, each, _, inner = first
    domain, transposed = (CONTRIB, {"transB": 1}) if node.op_type == "FusedMatMul" else ("", {})
    if second[0] == 1 < groups:
        groups, each = 1, groups * each  # all queries share the keys
    if each > 1 and second[1] == 1:
        rows = fuser.reshape(node, left, (groups, 1, each, inner))
        product = fuser.one(node, node.op_type, [rows, right], (groups, 1, each, result[3]), domain, **transposed)
        replace(node.outputs[0], fuser.reshape(node, product, result))
        return True
    twice = fuser.one(node, "Concat", [left, left], (groups, each, 2, inner), axis=2)
    product = fuser.one(node, node.op_type, [twice, right], (groups, each, 2, result[3]), domain, **transposed)
    kept, _ = fuser.insert(node, "Split", [product, fuser.integers([1, 1])], [result, result], axis=2)
    replace(node.outputs[0], kept)
    return True


def _pair(fuser: Fuser, node: ir.Node, twins: dict[ir.Value, ir.Value]) -> bool:
    """Repeat the last of an odd number of rows that 4-bit weights multiply."""
    if node.op_type != "MatMulNBits" or node.attributes["bits"].as_int() != _INT4:
        return False
    x, shape = node.inputs[0], shape_of(node.outputs[0])
    *lead, count, _ = shape
    if x is None or prod((*lead, count)) % 2 == 0:
        return False
    axis, width = len(lead), shape_of(x)[-1]
    if x not in twins:
        last = x
        if count > 1:
            shapes = [(*lead, count - 1, width), (*lead, 1, width)]
            _, last = fuser.insert(node, "Split", [x, fuser.integers([count - 1, 1])], shapes, axis=axis)
        twins[x] = fuser.one(node, "Concat", [x, last], (*lead, count + 1, width), axis=axis)
    even = (*lead, count + 1, shape[-1])
    attributes = {name: each.value for name, each in node.attributes.items()}
    product = fuser.one(node, "MatMulNBits", [twins[x], *node.inputs[1:]], even, node.domain, **attributes)
    sizes, shapes = fuser.integers([count, 1]), [shape, (*lead, 1, shape[-1])]
    replace(node.outputs[0], fuser.insert(node, "Split", [product, sizes], shapes, axis=axis)[0])
    return True
