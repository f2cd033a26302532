"""A pass: attention over the heads of a group at once, and fewer copies between the layouts of heads."""

from __future__ import annotations

from math import prod
from typing import Any

import onnx_ir as ir

from edgekv.runtime.merge.fusing import (
    CONTRIB,
    Fuser,
    axis_of,
    made_by,
    only_reader,
    perm_of,
    replace,
    shape_of,
)
from edgekv.runtime.rewrite import readers, remove_unused

_TO_HEADS = (2, 0, 1, 3)  # [1, AR, heads, D] to [heads, 1, AR, D]
_SWAPPED = (0, 1, 3, 2)


class FuseHeads(ir.passes.InPlacePass):
    """Rewrites the layouts of merged heads; needs shapes, and sums may be reordered.

    - What is split and concatenated again is split once.
    - Past and new rows of all heads are concatenated by one node.
    - Keys are not transposed: the product reads them as rows.
    - Queries that share keys are rows of one product.
    - With one row, heads are reshaped instead of transposed.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        fuser = Fuser(model.graph, "of_heads")
        rewrites = (_regroup, _append_at_once, _read_keys_as_rows, _multiply_together, _join_heads, _reshape_heads)
        changed: list[ir.Node] = []
        for rewrite in rewrites:
            changed += [node for node in [*model.graph] if rewrite(fuser, node)]
            remove_unused(model)
        if changed:
            model.graph.opset_imports[CONTRIB] = 1
        return ir.passes.PassResult(model, bool(changed))


def _regroup(fuser: Fuser, node: ir.Node) -> bool:
    """Split a stack into the stacks that its heads are concatenated to."""
    if node.op_type != "Split" or axis_of(node, 0) != 0:
        return False
    heads = [*node.outputs]
    sizes = {shape_of(each)[:1] for each in heads}
    if sizes != {(1,)}:
        return False
    runs: list[tuple[int, int, ir.Node | None]] = []
    first = 0
    while first < len(heads):
        stack = only_reader(heads[first])
        count = _heads_of(stack, heads, first)
        runs.append((first, count or 1, stack if count else None))
        first += count or 1
    if all(stack is None for _, _, stack in runs):
        return False
    source, rest = node.inputs[0], shape_of(heads[0])[1:]
    if len(runs) == 1:
        assert source is not None and runs[0][2] is not None, "a stack of all heads"
        replace(runs[0][2].outputs[0], source)
        return True
    counts = [count for _, count, _ in runs]
    shapes = [(count, *rest) for count in counts]
    parts = fuser.insert(node, "Split", [source, fuser.integers(counts)], shapes, axis=0)
    for part, (first, _, stack) in zip(parts, runs, strict=True):
        part.type = heads[first].type
        replace(heads[first] if stack is None else stack.outputs[0], part)
    return True


def _heads_of(stack: ir.Node | None, heads: list[ir.Value], first: int) -> int:
    """How many heads, from the first on, a node stacks, if it stacks nothing else; else 0."""
    if stack is None or stack.op_type != "Concat" or axis_of(stack, 0) != 0:
        return 0
    count = len(stack.inputs)
    same = [*stack.inputs] == heads[first : first + count]
    return count if same and all(only_reader(each) is stack for each in heads[first : first + count]) else 0


def _append_at_once(fuser: Fuser, node: ir.Node) -> bool:
    """Concatenate past and new rows of all heads with one node: a copy less of the past."""
    if node.op_type != "Concat" or len(node.inputs) != 2 or axis_of(node, 0) != 2:
        return False
    past = made_by(node.inputs[0], "Concat")
    new = next((each for each in readers(node.inputs[1]) if each.op_type == "Split"), None) if node.inputs[1] else None
    if past is None or new is None or axis_of(past, 0) != 0 or len(past.inputs) != len(new.outputs):
        return False
    shape = shape_of(node.outputs[0])
    heads, one, rows, width = shape
    pairs = [value for pair in zip(past.inputs, new.outputs, strict=True) for value in pair]
    appended = fuser.one(node, "Concat", pairs, (1, one, heads * rows, width), axis=2)
    appended.type = node.outputs[0].type
    replace(node.outputs[0], fuser.reshape(node, appended, shape))
    return True


def _read_keys_as_rows(fuser: Fuser, node: ir.Node) -> bool:
    """Multiply by transposed keys without transposing them."""
    if node.op_type != "MatMul":
        return False
    floats = made_by(node.inputs[1], "DequantizeLinear")
    turned = made_by(floats.inputs[0], "Transpose") if floats is not None else None
    if floats is None or turned is None or perm_of(turned) != _SWAPPED or axis_of(floats, 1) in (2, 3):
        return False
    keys = turned.inputs[0]
    rows = fuser.one(floats, "DequantizeLinear", [keys, *floats.inputs[1:]], shape_of(keys), **_axis(floats))
    inputs = [node.inputs[0], rows]
    product = fuser.one(node, "FusedMatMul", inputs, shape_of(node.outputs[0]), CONTRIB, transB=1)
    replace(node.outputs[0], product)
    return True


def _axis(node: ir.Node) -> dict[str, Any]:
    return {"axis": node.attributes["axis"].as_int()} if "axis" in node.attributes else {}


def _multiply_together(fuser: Fuser, node: ir.Node) -> bool:
    """Let the queries that share keys or values, `[groups, each, AR, D]`, be rows of one product."""
    if node.op_type not in ("MatMul", "FusedMatMul"):
        return False
    left, right, result = shape_of(node.inputs[0]), shape_of(node.inputs[1]), shape_of(node.outputs[0])
    by_group = made_by(node.inputs[0], "Reshape")
    if by_group is None or len(left) != 4 or len(right) != 4 or right[1] != 1 or left[1] == 1 or left[0] != right[0]:
        return False
    groups, each, rows, inner = left
    source = by_group.inputs[0]
    assert source is not None, "a tensor to reshape"
    stacked = fuser.reshape(node, source, (groups, 1, each * rows, inner))
    inputs = [stacked, node.inputs[1]]
    shape = groups, 1, each * rows, result[3]
    attributes = {"transB": 1} if node.op_type == "FusedMatMul" else {}
    product = fuser.one(node, node.op_type, inputs, shape, node.domain, **attributes)
    only = only_reader(node.outputs[0])
    if only is not None and only.op_type == "Reshape":
        replace(node.outputs[0], product)  # the elements have the same order
    else:
        replace(node.outputs[0], fuser.reshape(node, product, result))
    return True


def _join_heads(fuser: Fuser, node: ir.Node) -> bool:
    """Concatenate all heads of a stack along the width: `[heads, 1, AR, D]` to `[1, 1, AR, heads * D]`."""
    if node.op_type != "Concat" or len(shape_of(node.outputs[0])) != 4 or axis_of(node, 0) != 3:
        return False
    stack = made_by(node.inputs[0], "Split")
    if stack is None or axis_of(stack, 0) != 0 or [*node.inputs] != [*stack.outputs]:
        return False
    source = stack.inputs[0]
    shape = shape_of(source)
    if len(shape) != 4 or shape[0] != len(node.inputs) or source is None:
        return False
    heads, one, rows, width = shape
    if rows > 1:
        source = fuser.one(node, "Transpose", [source], (one, rows, heads, width), perm=[1, 2, 0, 3])
    replace(node.outputs[0], fuser.reshape(node, source, shape_of(node.outputs[0])))
    return True


def _reshape_heads(fuser: Fuser, node: ir.Node) -> bool:
    """Stack the parts of a product's width without moving them, or split the width at once.

    `[1, 1, AR, heads * D]` becomes `[heads, 1, AR, D]` by a transposition, which with one row moves nothing.
    """
    if node.op_type != "Transpose" or perm_of(node) != _TO_HEADS:
        return False
    by_head = made_by(node.inputs[0], "Reshape")
    wide = by_head.inputs[0] if by_head is not None else None
    shape = shape_of(node.outputs[0])
    if wide is None or len(shape) != 4:
        return False
    heads, _, rows, width = shape
    apart = only_reader(node.outputs[0])
    if apart is not None and apart.op_type == "Split" and axis_of(apart, 0) == 0 and len(apart.outputs) == heads:
        whole = shape_of(wide)
        if len(whole) == 4 and prod(whole) == heads * rows * width:
            sizes = fuser.integers([width] * heads)
            parts = fuser.insert(apart, "Split", [wide, sizes], [(*whole[:3], width)] * heads, axis=-1)
            for old, new in zip(apart.outputs, parts, strict=True):
                replace(old, new)
            return True
    if rows != 1:
        return False
    replace(node.outputs[0], fuser.reshape(node, wide, shape))
    return True
