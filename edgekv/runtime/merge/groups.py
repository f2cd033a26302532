"""Finds nodes of a graph that compute the same thing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import onnx_ir as ir

from edgekv.runtime.rewrite import dtype_and_shape
from edgekv.spec import LORA_PREFIX

_CHAIN = 12  # operations that follow a key before those that do not follow a query
_ADAPTER_OF_HEAD = f"{LORA_PREFIX}b_"


def constants(graph: ir.Graph) -> set[ir.Value]:
    """The initializers, and results computed only from them."""
    found = set(graph.initializers.values())
    for node in graph:
        if found.issuperset(node.inputs):
            found.update(node.outputs)
    return found


def groups(graph: ir.Graph, constant: set[ir.Value]) -> list[list[ir.Node]]:
    """The nodes whose results are not constant, grouped by what they compute; in an order in which groups can run.

    Two nodes are in one group if the graphs that lead to them are equal: the same operations in the same arrangement,
    on constants and past inputs of the same types and shapes. All nodes of a group are at the same distance from the
    inputs, so none depends on another.

    Args:
        graph: its nodes are in an order in which they can run.
        constant: what `constants` returns.
    """
    numbers: dict[Hashable, int] = {}
    origins: dict[ir.Value | None, int] = {}
    depths: dict[ir.Value | None, int] = defaultdict(int)

    def number(*thing: Hashable) -> int:
        """Equal for equal things."""
        return numbers.setdefault(thing, len(numbers))

    for name, value in graph.initializers.items():
        # Shapes and widths are compared by value.
        own = name if value.dtype == ir.DataType.INT64 else ""
        origins[value] = number("constant", own, *dtype_and_shape(value))
    for value in graph.inputs:
        # Every head has its own past and its own part of an adapter; other inputs are shared by all heads.
        own = "" if str(value.name).startswith(("past_", _ADAPTER_OF_HEAD)) else str(value.name)
        origins[value] = number("input", own, *dtype_and_shape(value))
    found: dict[tuple[int, int], list[ir.Node]] = defaultdict(list)
    for node in graph:
        depth = 1 + max((depths[value] for value in node.inputs), default=0)
        attributes = sorted(str(each) for each in node.attributes.values()) if node.attributes else ()
        origin = number(node.op_type, *attributes, *(origins.get(value) for value in node.inputs))
        for place, value in enumerate(node.outputs):
            origins[value] = number("output", origin, place)
            depths[value] = depth
        if node.outputs[0] not in constant:
            found[depth, origin].append(node)
    return [sorted(nodes, key=_next_operations) for _, nodes in sorted(found.items(), key=lambda item: item[0][0])]


def _next_operations(node: ir.Node) -> tuple[str, ...]:
    """The operations of the chain of first readers: sorting by it puts queries, keys and values beside their like."""
    chain: list[str] = []
    reader: ir.Node | None = node
    while len(chain) < _CHAIN and reader is not None:
        reader = next((use.node for use in reader.outputs[0].uses()), None)
        chain.append("" if reader is None else reader.op_type)
    return tuple(chain)
