"""A pass: no node that only changes a shape where the operations around it do without."""

from __future__ import annotations

import onnx_ir as ir

from edgekv.runtime.merge.fusing import Fuser, Shape, constant_of, made_by, only_reader, replace, shape_of
from edgekv.runtime.rewrite import remove_unused

_ALONG_WIDTH = (
    "MatMulNBits",
    "Split",
    "QuickGelu",
    "Mul",
    "Add",
    "Sigmoid",
    "Tanh",
    "Gelu",
    "SimplifiedLayerNormalization",
)
_ELEMENTWISE = ("Add", "Mul", "Tanh", "Softmax")


class SkipReshapes(ir.passes.InPlacePass):
    """Removes nodes that reshape; needs shapes.

    - Operations along the width read `[1, AR, W]` where only the shape makes it `[1, 1, AR, W]`.
    - Attention scores of one row keep the shape of the product.
    - A tensor that is reshaped twice is reshaped once.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        fuser = Fuser(model.graph, "flat")
        changed = [node for node in [*model.graph] if _skip_two(node)]
        remove_unused(model)
        changed += _Flat(fuser).run()
        remove_unused(model)
        changed += [node for node in [*model.graph] if _join_two(node)]
        remove_unused(model)
        return ir.passes.PassResult(model, bool(changed))


def _skip_two(node: ir.Node) -> bool:
    """Skip a change of the first axes that is undone after operations on each row."""
    if node.op_type != "Reshape":
        return False
    source, shape = node.inputs[0], shape_of(node.outputs[0])
    wanted = shape_of(source)
    chain: list[ir.Node] = []
    reader = only_reader(node.outputs[0])
    while reader is not None and reader.op_type in _ELEMENTWISE:
        chain.append(reader)
        reader = only_reader(reader.outputs[0])
    if reader is None or reader.op_type != "Reshape" or not chain or source is None:
        return False
    if shape_of(reader.outputs[0])[:-1] != wanted[:-1] or len(shape) < 1 or shape[-1] != wanted[-1]:
        return False
    within = {node.outputs[0], *(each.outputs[0] for each in chain)}
    others = [value for each in chain for value in each.inputs if value not in within]
    if any(shape_of(value)[:-1].count(1) != len(shape_of(value)[:-1]) for value in others):
        return False
    if any(
        each.op_type == "Softmax" and each.attributes.get_int("axis", -1) not in (-1, len(shape) - 1) for each in chain
    ):
        return False
    for each in chain:
        each.outputs[0].shape = ir.Shape(wanted)
    replace(node.outputs[0], source)
    replace(reader.outputs[0], chain[-1].outputs[0])
    return True


class _Flat:
    """Lets nodes read tensors of three axes instead of the four that they were reshaped to."""

    def __init__(self, fuser: Fuser) -> None:
        self._fuser = fuser
        self._flat: dict[ir.Value, ir.Value] = {}

    def run(self) -> list[ir.Node]:
        """Change the nodes that can, and return them."""
        changed = []
        for node in [*self._fuser.graph]:
            if node.op_type == "Reshape":
                self._note(node)
            elif node.op_type in _ALONG_WIDTH and self._can_read_flat(node):
                self._read_flat(node)
                changed.append(node)
        return changed

    def _note(self, node: ir.Node) -> None:
        source, result = node.inputs[0], node.outputs[0]
        if source is None:
            return
        source = self._flat.get(source, source)
        node.replace_input_with(0, source)
        shape, flat = shape_of(result), shape_of(source)
        if shape == flat:
            replace(result, source)
        elif len(flat) == 3 and shape == (1, *flat):
            self._flat[result] = source
        elif len(shape) == 4 and shape[:2] == (1, 1) and _is_for_product(result):
            self._flat[result] = self._fuser.reshape(node, source, shape[1:])

    def _can_read_flat(self, node: ir.Node) -> bool:
        if not any(value in self._flat for value in node.inputs):
            return False
        data = [*node.inputs[:1]] if node.op_type in ("MatMulNBits", "Split") else [*node.inputs]
        if node.op_type in ("Split", "SimplifiedLayerNormalization") and node.attributes.get_int("axis", 0) not in (
            -1,
            3,
        ):
            return False
        return all(value in self._flat or len(shape_of(value)) == 1 for value in data if value is not None)

    def _read_flat(self, node: ir.Node) -> None:
        for index, value in enumerate(node.inputs):
            if value in self._flat:
                node.replace_input_with(index, self._flat[value])
        if "axis" in node.attributes:
            node.attributes["axis"] = ir.AttrInt64("axis", -1)
        after = node
        for result in node.outputs:
            shape = shape_of(result)
            readers = [*result.uses()]
            result.shape = ir.Shape(shape[1:])
            view = self._view(after, result, shape)
            for use in readers:
                use.node.replace_input_with(use.idx, view)
            self._flat[view] = result

    def _view(self, after: ir.Node, value: ir.Value, shape: Shape) -> ir.Value:
        """The result of a node with four axes."""
        view = self._fuser.reshape(after, value, shape)
        reshaping = view.producer()
        assert reshaping is not None, "just made"
        self._fuser.graph.remove(reshaping)
        self._fuser.graph.insert_after(after, reshaping)
        return view


def _is_for_product(value: ir.Value) -> bool:
    reader = only_reader(value)
    return reader is not None and reader.op_type == "MatMulNBits"


def _join_two(node: ir.Node) -> bool:
    """Reshape the tensor that was reshaped before."""
    earlier = made_by(node.inputs[0], "Reshape") if node.op_type == "Reshape" else None
    target = constant_of(node.inputs[1]) if earlier is not None else None
    if earlier is None or earlier.inputs[0] is None or target is None or 0 in target:
        return False
    node.replace_input_with(0, earlier.inputs[0])
    return True
