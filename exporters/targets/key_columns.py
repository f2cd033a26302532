"""A pass: keys as columns, for runtimes that need this layout."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from edgekv.kv import KvTensor
from edgekv.runtime.rewrite import (
    NodeWriter,
    encoding,
    find_port,
    follow,
    readers,
    remove_unused,
    set_sizes,
    sizes,
    unlike,
)

_TURN = [0, 1, 3, 2]
_COLUMNS = -1  # axis of [1, 1, D, columns]


class KeysInColumns(ir.passes.InPlacePass):
    """Makes a graph that keeps keys in rows read `[1, 1, D, S-AR]` and write `[1, 1, D, AR]`.

    The result is the graph that `export --key-layout columns` writes: a new key is transposed before it joins the past
    ones, and the scores read the concatenated keys directly. No integer of a key changes.
    """

    def __init__(self, tensors: Iterable[KvTensor]) -> None:
        """Args: tensors: of the cache; those that the graph does not have belong to its other parts."""
        super().__init__()
        self._keys = [each for each in tensors if each.kind == "key"]

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        ports = [(find_port(graph.inputs, each.past), find_port(graph.outputs, each.new)) for each in self._keys]
        found = [(past, new) for past, new in ports if past is not None and new is not None]
        for past, new in found:
            _turn(graph, past, new)
        if found:
            remove_unused(model)
        return ir.passes.PassResult(model, bool(found))


def _turn(graph: ir.Graph, past: ir.Value, new: ir.Value) -> None:
    # row -> Quantize -> new -> Dequantize --+
    #                   past -> Dequantize -> Concat -> Quantize -> Dequantize -> Transpose -> ... -> Dequantize
    write = new.producer()
    row = None if write is None else write.inputs[0]
    made = None if row is None else row.producer()
    row_encoding = None if made is None else encoding(made)
    first = readers(past)
    if write is None or row is None or row_encoding is None or len(first) != 1:
        raise unlike(graph, f"{new.name}, which no row of a known encoding is quantized to")
    join = follow(first[0], "Concat")[-1]
    joined = follow(join, "DequantizeLinear")[-1].outputs[0]
    turned = follow(joined.producer() or join, "Transpose")[-1]
    join.attributes.add(ir.AttrInt64("axis", _COLUMNS))
    follow(turned, "DequantizeLinear")[-1].outputs[0].replace_all_uses_with(joined)

    writer = NodeWriter(graph)
    column = writer.node("Transpose", [row], f"{row.name}.t_f", perm=_TURN)
    column = writer.requantize(column, f"{row.name}.t", row_encoding)
    graph.insert_before(write, writer.nodes)
    write.replace_input_with(0, column)
    for port in (past, new):
        *ones, rows, width = sizes(port)
        set_sizes(port, [*ones, width, rows])
