"""A bundle's graph as Genie drives it: logits of every row, and embeddings instead of ids where Genie looks them up.

No integer changes: a row that was selected is one of all rows, and looking up is exact, wherever it is done.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekv.bundle import PartRecord
from edgekv.errors import BundleError
from edgekv.spec import EMBEDDINGS, IDS, LOGITS
from quant import Encoding

_INDEX = "logits_index"


class GraphAdapter:
    """One part of a graph, its weights left where they are."""

    def __init__(self, source: Path, part: PartRecord) -> None:
        """Read a part of a graph of a bundle."""
        self._source = source
        self._part = part
        self._model = onnx.load(source, load_external_data=False)
        self._graph = self._model.graph

    def return_all_rows(self, ar: int) -> bool:
        """Compute the logits of every row, `[1, AR, V]`, instead of one that `logits_index` or the host selects.

        Returns:
            Whether the graph was another before.

        Raises:
            BundleError: the graph does not end as edgekv's graphs do.
        """
        outputs = {each.name: each for each in self._graph.output}
        if not self._part.head or _dimension(outputs[LOGITS], 1).dim_value == ar:
            return False
        select = self._readers().get(_INDEX)
        if select is None:
            (hidden,) = (each for each in self._graph.input if each.name == self._part.entry)
            _dimension(hidden, 2).dim_value = ar
        else:
            self._drop_selection(select)
        _dimension(outputs[LOGITS], 1).dim_value = ar
        shape = self._constant(self._writers()[self._writers()[LOGITS].input[0]].input[1])
        whole = numpy_helper.to_array(shape).copy()
        whole[1] = ar
        shape.CopyFrom(numpy_helper.from_array(whole, shape.name))
        return True

    def _drop_selection(self, select: onnx.NodeProto) -> None:
        # hidden -> Gather -> Quantize -> Dequantize -> the final norm
        dropped = self._chain(select, "DequantizeLinear")
        hidden, row = select.input[0], dropped[-1].output[0]
        for node in self._graph.node:
            for at, name in enumerate(node.input):
                if name == row:
                    node.input[at] = hidden
        (index,) = (each for each in self._graph.input if each.name == _INDEX)
        self._graph.input.remove(index)
        self._drop(dropped)

    def take_table_out(self, table: Path) -> Encoding:
        """Read `inputs_embeds` `[1, 1, AR, hidden]` instead of ids.

        Args:
            table: gets the rows of all tokens, uint16 `[V, hidden]`, without a header.

        Returns:
            The encoding of the table and of `inputs_embeds`.

        Raises:
            BundleError: the graph does not begin as edgekv's graphs do.
        """
        # table -> Dequantize -> Gather -> Quantize -> Dequantize -> Reshape -> Quantize -> the decoder
        gather = self._readers().get(IDS)
        source = None if gather is None else self._writers().get(gather.input[0])
        if gather is None or source is None:
            raise self._unlike("no rows gathered by input_ids")
        reshaped = self._chain(gather, "Reshape")
        (last,) = self._readers_of(reshaped[-1].output[0])
        stored = self._constant(source.input[0])
        if last.op_type != "QuantizeLinear" or stored.data_type != TensorProto.UINT16:
            raise self._unlike(f"{last.op_type} of a table of type {TensorProto.DataType.Name(stored.data_type)}")
        scale, zero = (numpy_helper.to_array(self._constant(name)) for name in last.input[1:3])
        ids, hidden = self._ids(), stored.dims[1]
        ar = ids.type.tensor_type.shape.dim[1].dim_value
        ids.CopyFrom(helper.make_tensor_value_info(EMBEDDINGS, TensorProto.UINT16, [1, 1, ar, hidden]))
        for node in self._readers_of(last.output[0]):
            node.input[0] = EMBEDDINGS
        place = {entry.key: entry.value for entry in stored.external_data}
        with (self._source.parent / place["location"]).open("rb") as file:
            file.seek(int(place["offset"]))
            table.write_bytes(file.read(int(place["length"])))
        self._drop([source, *reshaped, last])
        return Encoding("u16", float(scale), int(zero))

    def save(self, target: Path) -> None:
        """Write the graph, and beside it hard links to its weights (copies, on another file system).

        ONNX Runtime follows no path that leads out of the graph's folder.
        """
        shards = {e.value for each in self._graph.initializer for e in each.external_data if e.key == "location"}
        for name in shards:
            if not (target.parent / name).exists():
                _link(self._source.parent / name, target.parent / name)
        onnx.save(self._model, target)

    def _chain(self, first: onnx.NodeProto, last: str) -> list[onnx.NodeProto]:
        """From a node on, through results that one node reads, to an operation of this type."""
        nodes = [first]
        while len(nodes) == 1 or nodes[-1].op_type != last:
            readers = self._readers_of(nodes[-1].output[0])
            if len(readers) != 1:
                raise self._unlike(f"{len(readers)} readers of {nodes[-1].output[0]}")
            nodes.append(readers[0])
        return nodes

    def _drop(self, nodes: list[onnx.NodeProto]) -> None:
        """Remove nodes, and the constants that no other node reads."""
        for node in nodes:
            self._graph.node.remove(node)
        used = {name for node in self._graph.node for name in node.input}
        for each in [each for each in self._graph.initializer if each.name not in used]:
            self._graph.initializer.remove(each)

    def _ids(self) -> onnx.ValueInfoProto:
        ids: onnx.ValueInfoProto = next(each for each in self._graph.input if each.name == IDS)
        return ids

    def _constant(self, name: str) -> onnx.TensorProto:
        constant: onnx.TensorProto = next(each for each in self._graph.initializer if each.name == name)
        return constant

    def _readers(self) -> dict[str, onnx.NodeProto]:
        return {name: node for node in self._graph.node for name in node.input}

    def _readers_of(self, name: str) -> list[onnx.NodeProto]:
        return [node for node in self._graph.node if name in node.input]

    def _writers(self) -> dict[str, onnx.NodeProto]:
        return {name: node for node in self._graph.node for name in node.output}

    def _unlike(self, found: str) -> BundleError:
        return BundleError(
            str(self._source),
            got=found,
            expected="a graph that begins and ends as edgekv's graphs do",
            fix="Export the bundle again with this edgekv, or leave out --embedding-table.",
        )


def _dimension(value: onnx.ValueInfoProto, axis: int) -> onnx.TensorShapeProto.Dimension:
    dimension: onnx.TensorShapeProto.Dimension = value.type.tensor_type.shape.dim[axis]
    return dimension


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
