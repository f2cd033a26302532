"""A pass: embeddings instead of token ids, for a table that Genie looks up itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgekv.runtime.rewrite import encoding, find_port, follow, make_port, readers, remove_unused, sizes, unlike
from edgekv.spec import EMBEDDINGS, IDS
from quant import Encoding


class ReadEmbeddings(ir.passes.InPlacePass):
    """Makes a part read `inputs_embeds` u16 `[1, 1, AR, hidden]` instead of ids, and writes the table to a file.

    No integer changes: looking up rows is exact.

    Attributes:
        encoding: of the table and of `inputs_embeds`; None before the pass has run.
    """

    def __init__(self, table: Path) -> None:
        """Args: table: file for the rows of all tokens, u16 `[V, hidden]`, without a header."""
        super().__init__()
        self._table = table
        self.encoding: Encoding | None = None

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Raises: BundleError: the graph does not begin as edgekv's graphs do."""
        # table -> Dequantize -> Gather -> Quantize -> Dequantize -> Reshape -> Quantize -> the decoder
        graph = model.graph
        ids = find_port(graph.inputs, IDS)
        gathers = [] if ids is None else readers(ids)
        rows = gathers[0].inputs[0] if gathers else None
        source = None if rows is None else rows.producer()
        stored = None if source is None else source.inputs[0]
        tensor = None if stored is None else stored.const_value
        if ids is None or not isinstance(tensor, ir.ExternalTensor) or tensor.dtype != ir.DataType.UINT16:
            raise unlike(graph, "no rows of a u16 table that input_ids select")
        reshape = follow(gathers[0], "Reshape")[-1]
        last = follow(reshape, "QuantizeLinear")[-1]
        # `tensor.numpy()` refuses a file with a second hard link, which a folder written beside this one may hold.
        count, width = tensor.shape.numpy()
        table = np.memmap(tensor.path, "<u2", "r", tensor.offset or 0, (count, width))
        with self._table.open("wb") as file:
            table.tofile(file)
        self.encoding = encoding(last)
        shape = [1, 1, sizes(ids)[1], width]
        embeddings = make_port(EMBEDDINGS, ir.DataType.UINT16, shape)
        last.outputs[0].replace_all_uses_with(embeddings)
        graph.inputs[graph.inputs.index(ids)] = embeddings
        remove_unused(model)
        return ir.passes.PassResult(model, True)
