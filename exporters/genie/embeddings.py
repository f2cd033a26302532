"""The embedding table beside the graphs: Genie looks the rows up, and the graphs read `inputs_embeds`.

Each binary is smaller by the table. The integers are the same: looking up is exact, wherever it is done.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekv.errors import BundleError
from exporters.genie.ports import EMBEDDINGS, IDS
from quant import Encoding

_SUFFIX = ".safetensors"


def take_table_out(source: Path, target: Path, table: Path) -> Encoding:
    """Write a graph that reads embeddings instead of ids, and the table that it had held.

    The new graph's folder gets hard links to the weights (copies, on another file system): ONNX Runtime follows no
    path that leads out of the graph's folder.

    Args:
        source: a bundle's graph.
        target: the new graph, in another folder.
        table: the rows of all tokens, uint16 `[V, hidden]`, without a header.

    Returns:
        The encoding of the table and of `inputs_embeds`.

    Raises:
        BundleError: the graph does not begin as edgekv's graphs do.
    """
    model = onnx.load(source, load_external_data=False)
    graph = model.graph
    writers = {name: node for node in graph.node for name in node.output}
    readers = {name: node for node in graph.node for name in node.input}
    try:
        # table -> Dequantize -> Gather -> Quantize -> Dequantize -> Reshape -> Quantize -> the decoder
        gather = readers[IDS]
        dropped = [writers[gather.input[0]], gather]
        while dropped[-2].op_type != "Reshape":
            dropped.append(readers[dropped[-1].output[0]])
        last = dropped[-1]
        stored = next(each for each in graph.initializer if each.name == dropped[0].input[0])
    except (KeyError, StopIteration):
        raise _unlike(source, "no rows gathered by input_ids") from None
    if last.op_type != "QuantizeLinear" or stored.data_type != TensorProto.UINT16:
        raise _unlike(source, f"{last.op_type} of a table of type {TensorProto.DataType.Name(stored.data_type)}")
    constants = {each.name: each for each in graph.initializer}
    scale, zero = (numpy_helper.to_array(constants[name]) for name in last.input[1:3])
    ids = next(each for each in graph.input if each.name == IDS)
    ar, hidden = ids.type.tensor_type.shape.dim[1].dim_value, stored.dims[1]
    ids.CopyFrom(helper.make_tensor_value_info(EMBEDDINGS, TensorProto.UINT16, [1, 1, ar, hidden]))
    readers[last.output[0]].input[0] = EMBEDDINGS
    for node in dropped:
        graph.node.remove(node)
    used = {name for node in graph.node for name in node.input}
    for each in [each for each in graph.initializer if each.name not in used]:
        graph.initializer.remove(each)
    _write_external(stored, source.parent, table)
    for weights in source.parent.glob(f"*{_SUFFIX}"):
        _link(weights, target.parent / weights.name)
    onnx.save(model, target)
    return Encoding("u16", float(scale), int(zero))


def _link(source: Path, target: Path) -> None:
    if target.exists():
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _write_external(stored: onnx.TensorProto, folder: Path, target: Path) -> None:
    place = {entry.key: entry.value for entry in stored.external_data}
    with (folder / place["location"]).open("rb") as file:
        file.seek(int(place["offset"]))
        target.write_bytes(file.read(int(place["length"])))


def _unlike(source: Path, found: str) -> BundleError:
    return BundleError(
        str(source),
        found=found,
        wanted="a 16-bit embedding table at the graph's begin",
        way_out="Leave out --embedding-table: the table then stays in the graphs.",
    )
