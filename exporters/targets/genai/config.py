"""The configuration of onnxruntime-genai, and the small graphs around the decoder that it connects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import onnx_ir as ir
from msgspec import UNSET, UnsetType

from edgekv.bundle import GraphRecord, Manifest
from edgekv.runtime.graph import rope_tables
from edgekv.spec import LOGITS, MASK, rope_inputs
from exporters.graphs.models import NodeWriter, declare, make_port
from exporters.graphs.qdq import IR_VERSION, OPSET, stacked_new, stacked_past
from quant import DTYPES

CONFIG = "genai_config.json"
TOKENIZER = "tokenizer.json"
POSITION_PROCESSOR = "position-processor.onnx"
DEQUANTIZER = "dequantizer.onnx"
POSITION_IDS, HELD_TOKENS, FLOAT_LOGITS = "position_ids", "held_tokens", "float_logits"

_LOG_ERRORS = 3


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    pass


class SessionOptions(_Part, frozen=True, kw_only=True):
    """The session options of one graph."""

    log_severity_level: int = _LOG_ERRORS
    disable_quant_qdq: str | UnsetType = msgspec.field(default=UNSET, name="session.disable_quant_qdq")
    disable_cpu_ep_fallback: str | UnsetType = msgspec.field(default=UNSET, name="session.disable_cpu_ep_fallback")
    provider_options: list[dict[str, dict[str, str]]] = []


class Stage(_Part, frozen=True, kw_only=True):
    """One graph of the pipeline. Stages run in order; each reads what earlier ones wrote."""

    filename: str
    inputs: list[str]
    outputs: list[str]
    session_options: SessionOptions | UnsetType = UNSET
    run_on_prompt: bool = True
    run_on_token_gen: bool = True


class SlidingWindow(_Part, frozen=True, kw_only=True):
    """The prompt runs in windows of `window_size` tokens; the first is padded in front."""

    window_size: int
    pad_value: int
    alignment: Literal["right"] = "right"
    slide_key_value_cache: bool = True


class DecoderInputs(_Part, frozen=True, kw_only=True):
    """The inputs that onnxruntime-genai fills; `%d` is the layer."""

    input_ids: str
    attention_mask: str
    position_ids: str
    past_key_names: str
    past_value_names: str


class DecoderOutputs(_Part, frozen=True, kw_only=True):
    """The outputs that it reads."""

    logits: str
    present_key_names: str
    present_value_names: str


class Decoder(_Part, frozen=True, kw_only=True):
    session_options: SessionOptions
    head_size: int
    hidden_size: int
    num_attention_heads: int
    num_hidden_layers: int
    num_key_value_heads: int
    inputs: DecoderInputs
    outputs: DecoderOutputs
    sliding_window: SlidingWindow
    pipeline: list[dict[str, Stage]]


class Model(_Part, frozen=True, kw_only=True):
    type: str
    bos_token_id: int | UnsetType = UNSET
    eos_token_id: list[int]
    pad_token_id: int
    vocab_size: int
    context_length: int
    decoder: Decoder


class Search(_Part, frozen=True, kw_only=True):
    """Greedy, until the context is full or an end token appears; programs may override it."""

    max_length: int
    do_sample: bool = False


class GenaiConfig(_Part, frozen=True, kw_only=True):
    model: Model
    search: Search


def genai_config(
    manifest: Manifest, decode: GraphRecord, prefill: GraphRecord, engine: str, pad_token: int
) -> GenaiConfig:
    """The configuration of a folder with these graphs.

    Args:
        manifest: of the bundle.
        decode: the AR-1 graph.
        prefill: the graph that runs the prompt, one window at a time.
        engine: the engine that runs the two graphs.
        pad_token: pads the first window in front; no prompt may contain it.
    """
    model = manifest.model
    options = _session_options(engine)
    sink = 0 if manifest.sink is None else len(manifest.sink.tokens)
    layers = range(model.layers)
    past = [stacked_past(kind, layer) for layer in layers for kind in ("key", "value")]
    new = [stacked_new(kind, layer) for layer in layers for kind in ("key", "value")]
    ports = manifest.interface.graph(decode)
    made = [port.name for port in ports.inputs if port.kind in ("mask", "cos", "sin")]
    reads, writes = [ports.entry.name, *made, *past], [ports.exit.name, *new]
    pipeline = {
        "position-processor": Stage(filename=POSITION_PROCESSOR, inputs=[POSITION_IDS, HELD_TOKENS], outputs=made),
        "prefill": Stage(
            filename=prefill.file, inputs=reads, outputs=writes, session_options=options, run_on_token_gen=False
        ),
        "decode": Stage(
            filename=decode.file, inputs=reads, outputs=writes, session_options=options, run_on_prompt=False
        ),
        "dequantizer": Stage(filename=DEQUANTIZER, inputs=[ports.exit.name], outputs=[FLOAT_LOGITS]),
    }
    decoder = Decoder(
        session_options=SessionOptions(),
        head_size=model.head_dim,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_hidden_layers=model.layers,
        num_key_value_heads=model.kv_heads,
        inputs=DecoderInputs(
            input_ids=ports.entry.name,
            attention_mask=HELD_TOKENS,
            position_ids=POSITION_IDS,
            past_key_names=stacked_past("key", "%d"),
            past_value_names=stacked_past("value", "%d"),
        ),
        outputs=DecoderOutputs(
            logits=FLOAT_LOGITS,
            present_key_names=stacked_new("key", "%d"),
            present_value_names=stacked_new("value", "%d"),
        ),
        sliding_window=SlidingWindow(window_size=prefill.ar, pad_value=manifest.geometry.zero_point),
        pipeline=[{name: stage} for name, stage in pipeline.items()],
    )
    return GenaiConfig(
        model=Model(
            type="decoder-pipeline",
            bos_token_id=UNSET if manifest.tokens.bos is None else manifest.tokens.bos,
            eos_token_id=manifest.tokens.eos,
            pad_token_id=pad_token,
            vocab_size=model.vocab,
            context_length=decode.context,
            decoder=decoder,
        ),
        # Longer texts would use the columns of the sink.
        search=Search(max_length=decode.context - sink),
    )


def _session_options(engine: str) -> SessionOptions:
    if engine == "cpu":
        # As `edgekv.runtime.CpuEngine`: without it weights are dequantized in every step.
        return SessionOptions(disable_quant_qdq="1")
    return SessionOptions(disable_cpu_ep_fallback="1", provider_options=[{"qnn": {"backend_type": "htp"}}])


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
