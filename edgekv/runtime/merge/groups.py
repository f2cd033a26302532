"""Which nodes of a graph do the same thing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

import onnx
from onnx import TensorProto

from edgekv.runtime.merge.net import Net


def groups(net: Net) -> Iterator[list[onnx.NodeProto]]:
    """The nodes whose results are no constants, those together that do the same; in an order in which groups can run.

    Nodes do the same if what leads to them is built alike: of the same operations in the same arrangement, on constants
    and past inputs of the same types and shapes. So no node of a group depends on another, nor do two groups on each
    other: all nodes of a group are equally far from the inputs.
    """
    numbers: dict[Hashable, int] = {}
    origins: dict[str, int] = {}
    depths: dict[str, int] = defaultdict(int)

    def number(*thing: Hashable) -> int:
        """The same for equal things."""
        return numbers.setdefault(thing, len(numbers))

    for name, value in net.initializers.items():
        # Shapes and widths are told by their values.
        own = name if value.data_type == TensorProto.INT64 else ""
        origins[name] = number("constant", own, value.data_type, *value.dims)
    for each in net.model.graph.input:
        # Every head has a past of its own; other inputs serve all.
        own = "" if each.name.startswith("past_") else each.name
        origins[each.name] = number("input", own, each.type.SerializeToString())
    found: dict[tuple[int, int], list[onnx.NodeProto]] = defaultdict(list)
    for node in net.nodes:
        depth = 1 + max((depths[name] for name in node.input), default=0)
        attributes = sorted(each.SerializeToString() for each in node.attribute)
        origin = number(node.op_type, *attributes, *(origins.get(name) for name in node.input))
        for place, name in enumerate(node.output):
            origins[name] = number("output", origin, place)
            depths[name] = depth
        if not net.alone(node):
            found[depth, origin].append(node)
    for _, nodes in sorted(found.items(), key=lambda item: item[0][0]):
        yield nodes
