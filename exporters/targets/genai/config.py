"""`genai_config.json`: what onnxruntime-genai reads of a model. Its names, as of 0.16."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from edgekv.bundle import GraphRecord, Manifest
from edgekv.machine.graph_file import plain_name
from exporters.graphs.qdq import stacked_new, stacked_past

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
            filename=plain_name(prefill.file),
            inputs=reads,
            outputs=writes,
            session_options=options,
            run_on_token_gen=False,
        ),
        "decode": Stage(
            filename=plain_name(decode.file), inputs=reads, outputs=writes, session_options=options, run_on_prompt=False
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
