"""A pass: the logits of every row, as Genie reads them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgekv.runtime.rewrite import find_port, follow, initializer, number, remove_unused, set_sizes, sizes, unlike
from edgekv.spec import LOGITS, PartRecord
from edgekv.spec.graph import LOGITS_INDEX

_ROWS = 1  # axis of [1, AR, V]


class ReturnAllRows(ir.passes.InPlacePass):
    """Lets a part compute the logits of every row, `[1, AR, V]`, instead of the one row that a prefill graph selects.

    No integer changes: the selected row is one of all rows.
    """

    def __init__(self, part: PartRecord, ar: int) -> None:
        """Args: part: what the model is. ar: its rows."""
        super().__init__()
        self._part = part
        self._ar = ar

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Raises: BundleError: the graph does not end as edgekv's graphs do."""
        graph = model.graph
        logits = find_port(graph.outputs, LOGITS)
        if not self._part.head or logits is None or sizes(logits)[_ROWS] == self._ar:
            return ir.passes.PassResult(model, False)
        if (index := find_port(graph.inputs, LOGITS_INDEX)) is not None:
            _drop_selection(graph, index)
        elif (hidden := find_port(graph.inputs, self._part.entry)) is not None:
            # a head by itself: the host selects the row
            set_sizes(hidden, [1, 1, self._ar, sizes(hidden)[-1]])
        shape = [1, self._ar, sizes(logits)[-1]]
        _reshape_to(graph, logits, shape)
        set_sizes(logits, shape)
        remove_unused(model)
        return ir.passes.PassResult(model, True)


def _drop_selection(graph: ir.Graph, index: ir.Value) -> None:
    # hidden -> Gather -> Quantize -> Dequantize -> the final norm
    (use,) = index.uses()
    hidden = use.node.inputs[0]
    if use.node.op_type != "Gather" or hidden is None:
        raise unlike(graph, f"{use.node.op_type} reads {LOGITS_INDEX}")
    follow(use.node, "DequantizeLinear")[-1].outputs[0].replace_all_uses_with(hidden)
    graph.inputs.remove(index)


def _reshape_to(graph: ir.Graph, logits: ir.Value, shape: list[int]) -> None:
    # ... -> Reshape -> Quantize -> logits
    quantize = logits.producer()
    source = None if quantize is None else quantize.inputs[0]
    reshape = None if source is None else source.producer()
    old = None if reshape is None else reshape.inputs[1]
    if reshape is None or reshape.op_type != "Reshape" or old is None or len(number(old)) != len(shape):
        raise unlike(graph, "logits that are not reshaped before they are quantized")
    new = initializer(f"{old.name}_all", np.array(shape, np.int64))
    graph.register_initializer(new)
    reshape.replace_input_with(1, new)
