"""One node for all heads, where the graph has one for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgekv.runtime.merge.groups import groups
from edgekv.runtime.merge.moves import move_integers
from edgekv.runtime.merge.net import Net

_BIASED = ("Add", "Sub", "Mul")  # may have a constant row of its own for each head
_ALONG_HEADS = (*_BIASED, "Sigmoid", "Tanh", "Gelu", "Softmax", "RMSNormalization", "Split", "Concat", "Transpose")


def merged(graph: Path) -> onnx.ModelProto:
    """The graph of an ONNX file with nodes that do the same for many heads merged into one; same inputs and outputs.

    Results of heads `[1, 1, AR, W]` are stacked to `[heads, 1, AR, W]`, in which every operation means what it meant;
    scales and zero points become vectors. Matrices that multiply one tensor lie side by side. No sum is reordered, so
    that every result has the same bits. Weights stay where they are, as external data.
    """
    model = onnx.load(graph, load_external_data=False)
    move_integers(model)
    return _Merger(Net(model)).run()


class _Merger:
    """Writes a graph anew, group by group."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._stacks: dict[tuple[str, ...], str] = {}
        self._members: dict[str, tuple[str, ...]] = {}
        self._apart: set[tuple[str, ...]] = set()

    def run(self) -> onnx.ModelProto:
        """The model with all groups merged that can be."""
        self._nodes += [node for node in self._net.nodes if self._net.alone(node)]
        for group in groups(self._net):
            if len(group) == 1 or not self._merge(group):
                for node in group:
                    self._read_apart(node.input)
                    self._nodes.append(node)
        self._read_apart(sorted(self._net.outputs))
        model = onnx.ModelProto()
        model.CopyFrom(self._net.model)
        del model.graph.node[:]
        del model.graph.value_info[:]
        model.graph.node.extend(self._nodes)
        model.graph.initializer.extend(self._constants.values())
        return model

    # ------------------------------------------------------------------ merging a group

    def _merge(self, group: list[onnx.NodeProto]) -> bool:
        """Write one node for all of the group; False, with nothing written, if there is none that does it."""
        first = group[0]
        columns = [tuple(names) for names in zip(*(node.input for node in group), strict=True)]
        results = [names[0] for names in columns if names[0] not in self._net.constants]
        if not all(self._is_head(name) for name in (*results, *first.output)):
            return False
        if self._net.encoding(first) is not None:
            inputs = [self._stacked(columns[0]), *(self._vector(names) for names in columns[1:])]
            self._write(group, first.op_type, inputs, **{**_attributes(first), "axis": 0})
            return True
        if first.op_type == "MatMul":
            return self._merge_products(group, *columns)
        if first.op_type not in _ALONG_HEADS or not _keeps_heads(first):
            return False
        if not all(self._can_stack(first.op_type, names) for names in columns):
            return False
        self._write(group, first.op_type, [self._stacked(names) for names in columns], **_attributes(first))
        return True

    def _merge_products(self, group: list[onnx.NodeProto], left: tuple[str, ...], right: tuple[str, ...]) -> bool:
        """Matrices that multiply one tensor become one; heads multiply the keys or values that their group shares."""
        if left[0] in self._net.constants:
            return False
        heads, inner = len(group), self._net.shapes[left[0]][3]
        rows, width = self._net.shapes[group[0].output[0]][2:]
        if right[0] in self._net.constants:
            if len(set(left)) > 1 or len(self._net.shapes[right[0]]) != 2:
                return False
            matrix = self._add("Concat", right, axis=1)
            product = self._add("MatMul", [self._stacked(left), matrix])
            apart = self._reshaped(product, [1, rows, heads, width])
            self._write(group, "Transpose", [apart], perm=[2, 0, 1, 3])
            return True
        shared = tuple(dict.fromkeys(right))
        each = heads // len(shared)
        if right != tuple(name for name in shared for _ in range(each)):
            return False
        if each == 1 or len(shared) == 1:
            self._write(group, "MatMul", [self._stacked(left), self._stacked(shared)])
            return True
        by_group = self._reshaped(self._stacked(left), [len(shared), each, rows, inner])
        product = self._add("MatMul", [by_group, self._stacked(shared)])
        self._write(group, "Reshape", [product, self._constant(np.array([heads, 1, rows, width]))])
        return True

    def _can_stack(self, op: str, names: tuple[str, ...]) -> bool:
        if len(set(names)) == 1:
            return op != "Concat"  # which repeats no input for all heads
        return names[0] not in self._net.constants or (op in _BIASED and len(self._net.shapes[names[0]]) == 1)

    def _write(self, group: list[onnx.NodeProto], op: str, inputs: Sequence[str], **attributes: Any) -> None:
        outputs = []
        for names in zip(*(node.output for node in group), strict=True):
            outputs.append(self._new_name(names[0]))
            self._stacks[names] = outputs[-1]
            self._members.update(dict.fromkeys(names, names))
        self._nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0] + "_node", **attributes))

    # ------------------------------------------------------------------ tensors, stacked and apart

    def _stacked(self, names: tuple[str, ...]) -> str:
        """The tensors on top of each other, or the one that all of them are."""
        if len(set(names)) == 1:
            self._read_apart(names[:1])
            return names[0]
        if names not in self._stacks:
            self._read_apart(names)
            stack = self._add("Concat", names, axis=0)
            if len(self._net.shapes[names[0]]) == 1:
                stack = self._reshaped(stack, [len(names), 1, 1, -1])
            self._stacks[names] = stack
        return self._stacks[names]

    def _read_apart(self, names: Sequence[str]) -> None:
        """Let tensors be read under their own names."""
        for name in names:
            members = self._members.get(name)
            if members is not None and members not in self._apart:
                self._apart.add(members)
                sizes = self._constant(np.ones(len(members), np.int64))
                stack = self._stacks[members]
                self._nodes.append(helper.make_node("Split", [stack, sizes], members, name=stack + "_apart", axis=0))

    def _vector(self, names: tuple[str, ...]) -> str:
        """The numbers of one-number constants, `[heads]`."""
        values = [numpy_helper.to_array(self._net.initializers[name]) for name in names]
        return self._constant(np.array(values, values[0].dtype))

    def _constant(self, value: NDArray[Any]) -> str:
        name = f"{value.dtype}_" + "_".join(repr(each) for each in value.tolist())
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(value, name)
        return name

    def _reshaped(self, tensor: str, shape: list[int]) -> str:
        return self._add("Reshape", [tensor, self._constant(np.array(shape))])

    def _add(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        output = self._new_name(inputs[0])
        self._nodes.append(helper.make_node(op, inputs, [output], name=output + "_node", **attributes))
        return output

    def _new_name(self, base: str) -> str:
        return f"{base}.merged_{len(self._nodes)}"

    def _is_head(self, name: str) -> bool:
        shape = self._net.shapes.get(name, ())
        return len(shape) == 4 and shape[0] == 1


def _keeps_heads(node: onnx.NodeProto) -> bool:
    """Whether an operation leaves the first of four axes alone."""
    attributes = _attributes(node)
    if node.op_type == "Transpose":
        return bool(attributes["perm"][0] == 0)
    return attributes.get("axis", 0 if node.op_type == "Split" else -1) not in (0, -4)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}
