"""A pass: one node for all heads instead of one node for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgekv.runtime.merge.groups import constants, groups
from edgekv.runtime.rewrite import InferredShapes, NodeWriter, number, parameters

_BIASED = ("Add", "Sub", "Mul")  # may have a constant row of its own for each head
_ALONG_HEADS = (*_BIASED, "Sigmoid", "Tanh", "Gelu", "Softmax", "RMSNormalization", "Split", "Concat", "Transpose")

_Values = tuple[ir.Value, ...]


class MergeHeads(ir.passes.InPlacePass):
    """Merges equal nodes of many heads; inputs, outputs and all bits of the results stay the same.

    Results of heads `[1, 1, AR, W]` are stacked to `[heads, 1, AR, W]`; every operation runs on the stack as on one
    head, with scales and zero points as vectors. Matrices that multiply the same tensor are concatenated. No sum is
    reordered, so every result has the same bits.
    """

    def __init__(self, shapes: InferredShapes) -> None:
        """Args: shapes: of the file that the model was loaded from."""
        super().__init__()
        self._shapes = shapes

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, _Merger(model.graph, self._shapes).run())


class _Merger:
    """Builds the new list of nodes, group by group."""

    def __init__(self, graph: ir.Graph, shapes: InferredShapes) -> None:
        self._graph = graph
        self._shape = cache(shapes.of)
        self._constants = constants(graph)
        self._writer = NodeWriter(graph)
        self._nodes = self._writer.nodes
        self._stacks: dict[_Values, ir.Value] = {}
        self._members: dict[ir.Value, _Values] = {}
        self._alone: dict[ir.Value, ir.Value] = {}
        self._number = cache(number)

    def run(self) -> bool:
        """Merge all groups that can be merged; return whether there was one."""
        self._nodes += [node for node in self._graph if node.outputs[0] in self._constants]
        merged = False
        for group in groups(self._graph, self._constants):
            if len(group) > 1 and self._merge(group):
                merged = True
                continue
            for node in group:
                for index, value in enumerate(node.inputs):
                    if value in self._members:
                        node.replace_input_with(index, self._read_alone(value))
                self._nodes.append(node)
        for index, value in enumerate(self._graph.outputs):
            if value in self._members:
                own = self._read_alone(value)
                own.type, own.shape = value.type, value.shape
                self._graph.outputs[index] = own
        if merged:
            # Merged nodes stay registered as uses of their inputs: detaching them takes a tenth of the merging time.
            self._graph.remove([*self._graph])
            self._graph.extend(self._nodes)
        return merged

    # ------------------------------------------------------------------ merging a group

    def _merge(self, group: list[ir.Node]) -> bool:
        """Write one node for all of the group; False, with nothing written, if that is not possible."""
        first = group[0]
        columns: list[_Values] = [*zip(*(node.inputs for node in group), strict=True)]
        results = [values[0] for values in columns if values[0] not in self._constants]
        if not all(self._is_head(value) for value in (*results, *first.outputs)):
            return False
        attributes = first.attributes.values()
        if parameters(first) is not None:
            inputs = [self._stacked(columns[0]), *(self._vector(values) for values in columns[1:])]
            others = [each for each in attributes if each.name != "axis"]
            self._write(group, first.op_type, inputs, [*others, ir.AttrInt64("axis", 0)])
            return True
        if first.op_type == "MatMul":
            return self._merge_products(group, *columns)
        if first.op_type not in _ALONG_HEADS or not _keeps_heads(first):
            return False
        if not all(self._can_stack(first.op_type, values) for values in columns):
            return False
        self._write(group, first.op_type, [self._stacked(values) for values in columns], attributes)
        return True

    def _merge_products(self, group: list[ir.Node], left: _Values, right: _Values) -> bool:
        """Matrices that multiply one tensor become one; heads multiply the keys or values that their group shares."""
        if left[0] in self._constants:
            return False
        heads, inner = len(group), self._shape(left[0])[3]
        rows, width = self._shape(group[0].outputs[0])[2:]
        if right[0] in self._constants:
            if len(set(left)) > 1 or len(self._shape(right[0])) != 2:
                return False
            matrix = self._add("Concat", right, axis=1)
            product = self._add("MatMul", [self._stacked(left), matrix])
            by_head = self._reshaped(product, [1, rows, heads, width])
            self._write(group, "Transpose", [by_head], [ir.AttrInt64s("perm", [2, 0, 1, 3])])
            return True
        shared = tuple(dict.fromkeys(right))
        each = heads // len(shared)
        if right != tuple(value for value in shared for _ in range(each)):
            return False
        if each == 1 or len(shared) == 1:
            self._write(group, "MatMul", [self._stacked(left), self._stacked(shared)])
            return True
        by_group = self._reshaped(self._stacked(left), [len(shared), each, rows, inner])
        product = self._add("MatMul", [by_group, self._stacked(shared)])
        self._write(group, "Reshape", [product, self._constant(np.array([heads, 1, rows, width], np.int64))])
        return True

    def _can_stack(self, op: str, values: _Values) -> bool:
        if len(set(values)) == 1:
            return op != "Concat"  # does not broadcast
        return values[0] not in self._constants or (op in _BIASED and len(self._shape(values[0])) == 1)

    def _write(
        self, group: list[ir.Node], op: str, inputs: Sequence[ir.Value], attributes: Iterable[ir.Attr] = ()
    ) -> None:
        results: list[_Values] = [*zip(*(node.outputs for node in group), strict=True)]
        names = [self._new_name(values[0]) for values in results]
        for values, stack in zip(results, self._writer.with_attributes(op, inputs, names, attributes), strict=True):
            self._stacks[values] = stack
            self._members.update(dict.fromkeys(values, values))

    # ------------------------------------------------------------------ tensors, stacked and alone

    def _stacked(self, values: _Values) -> ir.Value:
        """The tensors stacked; if all are the same tensor, that tensor."""
        if len(set(values)) == 1:
            return self._read_alone(values[0])
        if values not in self._stacks:
            stack = self._add("Concat", [self._read_alone(value) for value in values], axis=0)
            if len(self._shape(values[0])) == 1:
                stack = self._reshaped(stack, [len(values), 1, 1, -1])
            self._stacks[values] = stack
        return self._stacks[values]

    def _read_alone(self, value: ir.Value) -> ir.Value:
        """The tensor of one head, split from its stack if it was merged into one."""
        members = self._members.get(value)
        if members is None:
            return value
        if value not in self._alone:
            stack = self._stacks[members]
            inputs = [stack, self._constant(np.ones(len(members), np.int64))]
            names = [str(each.name) for each in members]
            axis = [ir.AttrInt64("axis", 0)]
            self._alone.update(zip(members, self._writer.with_attributes("Split", inputs, names, axis), strict=True))
            self._nodes[-1].name = f"{stack.name}_apart"
        return self._alone[value]

    def _vector(self, values: _Values) -> ir.Value:
        """The numbers of scalar constants, `[heads]`."""
        return self._constant(np.array([self._number(value) for value in values]))

    def _constant(self, value: NDArray[Any]) -> ir.Value:
        return self._writer.constant(f"{value.dtype}_" + "_".join(repr(each) for each in value.tolist()), value)

    def _reshaped(self, tensor: ir.Value, shape: list[int]) -> ir.Value:
        return self._add("Reshape", [tensor, self._constant(np.array(shape, np.int64))])

    def _add(self, op: str, inputs: Sequence[ir.Value], **attributes: Any) -> ir.Value:
        return self._writer.node(op, inputs, self._new_name(inputs[0]), **attributes)

    def _new_name(self, base: ir.Value) -> str:
        return f"{base.name}.merged_{len(self._nodes)}"

    def _is_head(self, value: ir.Value) -> bool:
        shape = self._shape(value)
        return len(shape) == 4 and shape[0] == 1


def _keeps_heads(node: ir.Node) -> bool:
    """Whether an operation leaves the first of four axes unchanged."""
    if node.op_type == "Transpose":
        return node.attributes["perm"].as_ints()[0] == 0
    return node.attributes.get_int("axis", 0 if node.op_type == "Split" else -1) not in (0, -4)
