"""A graph without its attention: what binaries take for the matrices alone."""

from __future__ import annotations

from pathlib import Path

import onnx


def write_without_attention(source: Path, target: Path) -> None:
    """Write a graph in whose layers the concatenated queries replace the outputs of the heads.

    Every matrix and norm is left, and so are the new keys and values. What only scores, masks, softmax and weighted
    values needed is gone, past rows of the cache among it. The result computes nothing of use.

    Args:
        source: an ONNX graph of a bundle.
        target: the file to write, in a folder that has the weights of `source`.

    Raises:
        ValueError: the graph has no attention of this form.
    """
    model = onnx.load(source, load_external_data=False)
    graph = model.graph
    joined = 0
    for node in graph.node:
        layer = node.output[0].split("attention")[0]
        if (
            node.op_type == "Concat"
            and node.output[0] != layer
            and all(name.startswith(layer + "attention") for name in node.input)
        ):
            node.input[:] = [f"{layer}q.h{head}" for head in range(len(node.input))]
            joined += 1
    if not joined:
        raise ValueError(f"{source.name}: got no joined heads, expected one Concat a layer")
    _drop_unused(graph)
    onnx.save(model, target)


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Drop nodes, inputs and constants that no output needs."""
    needed, kept = {output.name for output in graph.output}, []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
    for field, left in (
        (graph.node, kept[::-1]),
        (graph.input, [each for each in graph.input if each.name in needed]),
        (graph.initializer, [each for each in graph.initializer if each.name in needed]),
    ):
        del field[:]
        field.extend(left)  # type: ignore[attr-defined]
