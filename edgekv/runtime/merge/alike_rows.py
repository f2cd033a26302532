"""A pass: a row of attention is summed in the same order alone and beside other rows."""

from __future__ import annotations

import onnx_ir as ir

from edgekv.runtime.merge.fusing import CONTRIB, Fuser, replace, shape_of
from edgekv.runtime.rewrite import remove_unused


class AlikeRows(ir.passes.InPlacePass):
    """Gives products of queries with keys, and of probabilities with values, two rows at least; needs shapes.

    The runtime sums a product of one row in another order than one of several. With this pass a decode step has the
    bits of a row of a larger step, if both have each token in the same column; see `OpenRows`.

    - Queries that share keys become rows of one product.
    - A query that has keys of its own is multiplied twice.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        fuser = Fuser(model.graph, "alike")
        products = [node for node in [*model.graph] if _is_of_one_row(node)]
        for node in products:
            _widen(fuser, node)
        remove_unused(model)
        return ir.passes.PassResult(model, bool(products))


def _is_of_one_row(node: ir.Node) -> bool:
    """Whether a node multiplies a single row by a tensor that is no weight."""
    if node.op_type not in ("MatMul", "FusedMatMul"):
        return False
    left, right = shape_of(node.inputs[0]), shape_of(node.inputs[1])
    return len(left) == len(right) == 4 and left[2] == 1


def _widen(fuser: Fuser, node: ir.Node) -> None:
    left, right = node.inputs
    assert left is not None and right is not None, "two factors"
    result = shape_of(node.outputs[0])
    groups, each, _, inner = shape_of(left)
    domain, transposed = (CONTRIB, {"transB": 1}) if node.op_type == "FusedMatMul" else ("", {})
    if each > 1 and shape_of(right)[1] == 1:
        rows = fuser.reshape(node, left, (groups, 1, each, inner))
        product = fuser.one(node, node.op_type, [rows, right], (groups, 1, each, result[3]), domain, **transposed)
        replace(node.outputs[0], fuser.reshape(node, product, result))
        return
    twice = fuser.one(node, "Concat", [left, left], (groups, each, 2, inner), axis=2)
    product = fuser.one(node, node.op_type, [twice, right], (groups, each, 2, result[3]), domain, **transposed)
    first, _ = fuser.insert(node, "Split", [product, fuser.integers([1, 1])], [result, result], axis=2)
    replace(node.outputs[0], first)
