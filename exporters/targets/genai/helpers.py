"""The two graphs between onnxruntime-genai and the decoder: what it passes is not what the NPU reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from edgekv.bundle import Manifest
from edgekv.runtime.graph import rope_tables
from edgekv.spec import LOGITS, MASK, rope_inputs
from exporters.graphs.models import NodeWriter, declare, make_port
from exporters.graphs.qdq import IR_VERSION, OPSET
from exporters.targets.genai.config import FLOAT_LOGITS, HELD_TOKENS, POSITION_IDS
from quant import DTYPES

_INT32 = ir.DataType.INT32


def position_processor(manifest: Manifest, context: int) -> ir.Model:
    """Mask and rotary tables of a step, from the positions of its tokens and from the columns that hold tokens.

    Inputs: `position_ids` int32 `[1, AR]`, `held_tokens` int32 `[1, S]` (1 for the columns of tokens, 0 for those of
    padding and for empty ones). Outputs: `attention_mask` u16 `[1, 1, AR, S]`, in which a row also masks the
    step's later tokens, `position_ids_cos` and `position_ids_sin` `[1, 1, AR, R/2]`. The rotary values are looked up in
    the table of edgekv's own loop. onnxruntime-genai does not know of a sink: with one of n tokens, positions count
    from n, and the first n columns are open.

    Args:
        manifest: of the bundle.
        context: S.
    """
    sink = 0 if manifest.sink is None else len(manifest.sink.tokens)
    cos, sin = rope_tables(manifest)[""].rows(sink, context)
    graph = _graph("position-processor")
    new = NodeWriter(graph)
    ids, held_tokens = make_port(POSITION_IDS, _INT32, [1, "AR"]), make_port(HELD_TOKENS, _INT32, [1, context])
    total = new.constant("context", np.array(context, np.int64))

    positions = new.node("Reshape", [ids, new.constant("flat", np.array([-1], np.int64))], "positions")
    rotary = [
        new.node("Gather", [new.constant(f"{name}_table", table), positions], f"{name}_rows")
        for name, table in zip(rope_inputs(""), (cos, sin), strict=True)
    ]
    shape = new.constant("rows_of_table", np.array([1, 1, -1, cos.shape[1]], np.int64))
    outputs = [new.node("Reshape", [rows, shape], str(rows.name).removesuffix("_rows")) for rows in rotary]

    # Row i is token i of the step: its own column is the first of the new ones, S-AR, plus i.
    past_columns = new.node("Sub", [total, new.node("Size", [positions], "ar")], "past_columns")
    one = new.constant("one", np.array(1, np.int64))
    own_column = new.node("Range", [past_columns, total, one], "own_column")
    upright = new.constant("upright", np.array([-1, 1], np.int64))
    own_columns = new.node("Reshape", [own_column, upright], "own_columns")
    columns = new.constant("columns", np.arange(context, dtype=np.int64)[None])
    not_later = new.node("LessOrEqual", [columns, own_columns], "not_later")
    held = new.node("Greater", [held_tokens, new.constant("nothing", np.array(0, np.int32))], "held")
    is_open = new.node("And", [not_later, held], "open")
    if sink:
        in_sink = new.constant("in_sink", np.arange(context)[None] < sink)
        is_open = new.node("Or", [is_open, in_sink], "open_or_sink")
    level = new.node("Cast", [is_open], "level", to=ir.DataType.INT64)
    levels = new.constant("mask_levels", np.array([0, np.iinfo(np.uint16).max], np.uint16))
    mask = new.node("Gather", [levels, level], "mask")
    rows_of_mask = new.constant("rows_of_mask", np.array([1, 1, -1, context], np.int64))
    outputs.insert(0, new.node("Reshape", [mask, rows_of_mask], MASK))

    dtypes = np.dtype(np.uint16), cos.dtype, sin.dtype
    for value, dtype, width in zip(outputs, dtypes, (context, cos.shape[1], sin.shape[1]), strict=True):
        declare(value, ir.DataType.from_numpy(dtype), [1, 1, "AR", width])
    return _model(graph, new.nodes, [ids, held_tokens], outputs)


def dequantizer(manifest: Manifest) -> ir.Model:
    """`float_logits` float32 `[1, 1, V]` from the decoder's `logits` `[1, 1, V]`.

    onnxruntime-genai needs only one row; the static 1 tells it that there are no more.
    """
    shape = [1, 1, manifest.model.vocab]
    graph = _graph("dequantizer")
    new = NodeWriter(graph)
    encoding = manifest.encodings[LOGITS]
    logits = make_port(LOGITS, ir.DataType.from_numpy(np.dtype(DTYPES[encoding.dtype])), shape)
    floats = new.dequantize(logits, FLOAT_LOGITS, encoding)
    declare(floats, ir.DataType.FLOAT, shape)
    return _model(graph, new.nodes, [logits], [floats])


def _graph(name: str) -> ir.Graph:
    return ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)


def _model(
    graph: ir.Graph, nodes: Sequence[ir.Node], inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]
) -> ir.Model:
    graph.inputs.extend(inputs)
    graph.extend(nodes)
    graph.outputs.extend(outputs)
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="edgekv")
