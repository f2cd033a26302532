"""Moves integers instead of floats."""

from __future__ import annotations

import onnx

from edgekv.runtime.merge.net import Net

_MOVES = {"Concat": None, "Gather": 1, "Reshape": 1, "Split": 1, "Transpose": 1}
"""Operations that only move elements, and how many of their inputs hold them; None for all."""


def move_integers(model: onnx.ModelProto) -> None:
    """Let operations that only move elements work on the integers around them, where one encoding holds throughout.

    What is dequantized, moved and quantized again with the same scale and zero point is the integers, moved: to
    dequantize rounds by far less than half a step of 16 bits.
    """
    net = Net(model)
    unmade: set[str] = set()
    for node in net.nodes:
        if node.op_type not in _MOVES:
            continue
        count = len(node.input) if _MOVES[node.op_type] is None else 1
        before = [net.maker.get(name) for name in node.input[:count]]
        after = [net.readers[name] for name in node.output]
        if any(name in net.outputs for name in node.output) or any(len(readers) != 1 for readers in after):
            continue
        sources = [each for each in before if each is not None and each.op_type == "DequantizeLinear"]
        targets = [each for (each,) in after if each.op_type == "QuantizeLinear"]
        if len(sources) != count or len(targets) != len(node.output):
            continue
        encodings = {net.encoding(each) for each in (*sources, *targets)}
        if len(encodings) != 1 or None in encodings:
            continue
        node.input[:count] = [each.input[0] for each in sources]
        unmade.update(node.output)
        node.output[:] = [each.output[0] for each in targets]
    _remove_readers(model, unmade)


def _remove_readers(model: onnx.ModelProto, unmade: set[str]) -> None:
    """Take out the nodes that read tensors which are not made any more, and all that nobody reads."""
    read = {each.name for each in model.graph.output}
    kept = []
    for node in reversed(model.graph.node):
        if unmade.isdisjoint(node.input) and not read.isdisjoint(node.output):
            kept.append(node)
            read.update(node.input)
    del model.graph.node[:]
    model.graph.node.extend(reversed(kept))
