"""The two graphs that stand between onnxruntime-genai and the decoder: what it passes is not what the NPU reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekv.bundle import Manifest
from edgekv.runtime.rope import rope_tables
from exporters.graphs.qdq import IR_VERSION, OPSET
from quant import DTYPES

POSITION_IDS = "position_ids"
HELD_TOKENS = "held_tokens"
FLOAT_LOGITS = "float_logits"


def position_processor(manifest: Manifest, context: int) -> onnx.ModelProto:
    """Mask and rotary tables of a step, from the positions of its tokens and from the columns that hold tokens.

    Inputs: `position_ids` int32 `[1, AR]`, `held_tokens` int32 `[1, S]` (1 for the columns of tokens, 0 for those of
    padding and for empty ones). Outputs: `attention_mask` u16 `[1, 1, AR, S]`, in which a row also closes the
    columns of the step's later tokens, `position_ids_cos` and `position_ids_sin` `[1, 1, AR, R/2]`. The rotary
    values are looked up among the integers that edgekv's own loop writes.

    Args:
        manifest: of the bundle.
        context: S.
    """
    cos, sin = rope_tables(manifest)[""].rows(0, context)
    constants = {
        "cos_of_position": cos,
        "sin_of_position": sin,
        "mask_levels": np.array([0, np.iinfo(np.uint16).max], np.uint16),
        "columns": np.arange(context, dtype=np.int64)[None],
        "context": np.array(context, np.int64),
        "one": np.array(1, np.int64),
        "nothing": np.array(0, np.int32),
        "flat": np.array([-1], np.int64),
        "upright": np.array([-1, 1], np.int64),
        "rows_of_table": np.array([1, 1, -1, cos.shape[1]], np.int64),
        "rows_of_mask": np.array([1, 1, -1, context], np.int64),
    }
    nodes = [
        _node("Reshape", [POSITION_IDS, "flat"], "positions"),
        *_looked_up("cos_of_position", "position_ids_cos"),
        *_looked_up("sin_of_position", "position_ids_sin"),
        # Row i is token i of the step: its own column is the first of the new ones, S-AR, plus i.
        _node("Size", ["positions"], "ar"),
        _node("Sub", ["context", "ar"], "past_columns"),
        _node("Range", ["past_columns", "context", "one"], "own_column"),
        _node("Reshape", ["own_column", "upright"], "own_columns"),
        _node("LessOrEqual", ["columns", "own_columns"], "not_later"),
        _node("Greater", [HELD_TOKENS, "nothing"], "held"),
        _node("And", ["not_later", "held"], "open"),
        _node("Cast", ["open"], "level", to=TensorProto.INT64),
        _node("Gather", ["mask_levels", "level"], "mask"),
        _node("Reshape", ["mask", "rows_of_mask"], "attention_mask"),
    ]
    half = int(cos.shape[1])
    rotary = [
        _port(name, helper.np_dtype_to_tensor_dtype(values.dtype), [1, 1, "AR", half])
        for name, values in (("position_ids_cos", cos), ("position_ids_sin", sin))
    ]
    return _model(
        "position-processor",
        nodes,
        [_port(POSITION_IDS, TensorProto.INT32, [1, "AR"]), _port(HELD_TOKENS, TensorProto.INT32, [1, context])],
        [_port("attention_mask", TensorProto.UINT16, [1, 1, "AR", context]), *rotary],
        constants,
    )


def dequantizer(manifest: Manifest) -> onnx.ModelProto:
    """`float_logits` float32 `[1, 1, V]` from the decoder's `logits` `[1, 1, V]`.

    One row is all that onnxruntime-genai needs, and the static 1 tells it that there is no more.
    """
    encoding = manifest.encodings["logits"]
    integers = np.array(encoding.zero_point, DTYPES[encoding.dtype])
    shape = [1, 1, manifest.model.vocab]
    return _model(
        "dequantizer",
        [_node("DequantizeLinear", ["logits", "scale", "zero_point"], FLOAT_LOGITS)],
        [_port("logits", helper.np_dtype_to_tensor_dtype(integers.dtype), shape)],
        [_port(FLOAT_LOGITS, TensorProto.FLOAT, shape)],
        {"scale": np.array(encoding.scale, np.float32), "zero_point": integers},
    )


def _looked_up(table: str, name: str) -> list[onnx.NodeProto]:
    rows = f"{name}_rows"
    return [_node("Gather", [table, "positions"], rows), _node("Reshape", [rows, "rows_of_table"], name)]


def _node(op: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name=output + "_node", **attributes)


def _port(name: str, dtype: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _model(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: dict[str, np.ndarray[Any, Any]],
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(value, key) for key, value in constants.items()]
    graph = helper.make_graph(nodes, name, inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", OPSET)]
    model: onnx.ModelProto = helper.make_model(
        graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="edgekv"
    )
    return model
