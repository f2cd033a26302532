"""Writing the folder that onnxruntime-genai loads from a bundle: the decoder's graphs, and the two around them, because
what onnxruntime-genai passes is not what the NPU reads.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from devices import Device
from edgekv.bundle import Bundle, GraphRecord, Manifest, atomic_directory
from edgekv.engine.sink import read_sink
from edgekv.errors import BundleError, UsageError
from edgekv.machine.graph_file import plain_name
from edgekv.machine.json_file import readable_json
from edgekv.runtime.graph import rope_tables
from edgekv.spec import LOGITS, MASK, rope_inputs
from exporters.capabilities import GENAI
from exporters.compile import compile_folder, floating_in
from exporters.graphs.models import NodeWriter, declare, make_port, save_model
from exporters.graphs.parts import build_part, save_part
from exporters.graphs.qdq import IR_VERSION, OPSET, GraphForm, QdqOps
from exporters.progress import Progress, silent
from exporters.targets.genai.config import (
    CONFIG,
    DEQUANTIZER,
    FLOAT_LOGITS,
    HELD_TOKENS,
    POSITION_IDS,
    POSITION_PROCESSOR,
    genai_config,
)
from exporters.targets.genai.folder import GENAI_MANIFEST, GenaiManifest
from exporters.targets.genai.options import GenaiOptions
from exporters.targets.genai.proof import prove_integers
from exporters.targets.record import copy_tokenizer, write_record
from quant import DTYPES

_INT32 = ir.DataType.INT32


def write_genai(
    bundle: Bundle, target: Path, options: GenaiOptions, *, force: bool = False, progress: Progress = silent
) -> GenaiManifest:
    """Write the graphs with stacked heads, the two graphs around them, configuration and tokenizer.

    Args:
        bundle: what to write.
        target: the folder; it appears complete or not at all.
        options: see `GenaiOptions`.
        force: replace an earlier folder.
        progress: called for each stage.

    Raises:
        BundleError: onnxruntime-genai cannot express something of the bundle.
        UsageError: the target exists, or no id for padding can be found.
        EngineError: the compiler refused a graph, would compute part of it in float, or gives other integers.
    """
    manifest = bundle.manifest
    decode, prefill = choose_graphs(bundle)
    pad_token = choose_pad_token(bundle, options.pad_token)
    with atomic_directory(target, force=force, marker=GENAI_MANIFEST) as folder:
        graphs = folder / "graphs" if options.device else folder
        graphs.mkdir(exist_ok=True)
        if options.device is None:  # a folder of its own: links to the bundle's files will not do
            for name in manifest.weights.files:
                shutil.copyfile(bundle.path / name, graphs / name)
        for graph in (decode, prefill):
            save_part(stacked_graph(bundle, graph), graphs / plain_name(graph.file), bundle.path)
        if options.check:
            stacked = {graph.name: graphs / plain_name(graph.file) for graph in (decode, prefill)}
            progress("compare", 0, 1)
            prove_integers(bundle, stacked, options.device)
            progress("compare", 1, 1)
        floating = None
        if options.device:
            compiled = [graphs / plain_name(graph.file) for graph in (decode, prefill)]
            floating = _compile(bundle, options.device, compiled, folder, options, progress)
            shutil.rmtree(graphs)
        save_model(position_processor(manifest, decode.context), folder / POSITION_PROCESSOR)
        save_model(dequantizer(manifest), folder / DEQUANTIZER)
        config = genai_config(manifest, decode, prefill, options.engine, pad_token)
        (folder / CONFIG).write_bytes(readable_json(config))
        copy_tokenizer(bundle, folder)
        return write_record(
            GenaiManifest,
            folder,
            GENAI_MANIFEST,
            bundle,
            soc=options.device.soc if options.device else None,
            checked=options.check,
            floating=floating,
            context=decode.context,
            window=prefill.ar,
            pad_token=pad_token,
            shared_weights=options.share_weights,
            sink=[] if manifest.sink is None else manifest.sink.tokens,
            left_out=[graph.name for graph in manifest.graphs if graph.role == "verify"],
        )


def choose_graphs(bundle: Bundle) -> tuple[GraphRecord, GraphRecord]:
    """The decode graph and the prefill graph of the longest context that has both.

    Raises:
        BundleError: onnxruntime-genai cannot work with the bundle's cache or graphs.
    """
    GENAI.check(bundle)
    manifest = bundle.manifest
    decode = {graph.context: graph for graph in manifest.graphs if graph.role == "decode"}
    prefill = [graph for graph in manifest.graphs if graph.role == "prefill" and graph.context in decode]
    fitting = [graph for graph in prefill if graph.context >= 2 * graph.ar]
    if not fitting:
        least = min(prefill, key=lambda graph: graph.ar / graph.context)
        raise BundleError(
            f"bundle {bundle.path}: {least.name}",
            got=f"context {least.context}, {least.ar} tokens per inference",
            expected=f"a context of at least twice the window, {2 * least.ar}",
            fix="Export again with a larger --context or a smaller --ar.",
        )
    chosen = max(fitting, key=lambda graph: (graph.context, graph.ar))
    return decode[chosen.context], chosen


def choose_pad_token(bundle: Bundle, token_id: int | None) -> int:
    """An id for padding. onnxruntime-genai masks every token with this id, also in a prompt.

    The default is the bundle's padding token, unless it begins or ends a text; otherwise the last id of the vocabulary
    that the tokenizer never produces.

    Raises:
        UsageError: the given id cannot be used, or there is no such id.
    """
    manifest = bundle.manifest
    used = {manifest.tokens.bos, *manifest.tokens.eos}
    expected = f"an id below {manifest.model.vocab} that no prompt contains and that does not start or end a text"
    if token_id is not None:
        if not 0 <= token_id < manifest.model.vocab or token_id in used:
            raise UsageError("--pad-token-id", got=token_id, expected=expected, fix="Choose another id.")
        return token_id
    if manifest.tokens.pad is not None and manifest.tokens.pad not in used:
        return manifest.tokens.pad
    tokenizer = bundle.tokenizer()
    written = set(tokenizer.get_vocab(with_added_tokens=True).values())
    for token in reversed(range(manifest.model.vocab)):
        if token not in written:
            return token
    special = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if i not in used}
    listed = ", ".join(f"{i} ({text})" for i, text in sorted(special.items())[:5]) or "none"
    raise UsageError(
        "padding",
        got="a bundle without a padding token of its own",
        expected=expected,
        fix=f"Name one with --pad-token-id; special tokens that could serve: {listed}.",
    )


def stacked_graph(bundle: Bundle, record: GraphRecord) -> QdqOps:
    """A graph with the cache that onnxruntime-genai passes: keys in columns, stacked heads, the sink as constants.

    It pads in front, so the last row is the last token's.
    """
    form = GraphForm(stacks_heads=True, selects_last=True, sink=read_sink(bundle))
    return build_part(bundle.manifest, record, record.part, form, key_layout="columns")


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


def _compile(
    bundle: Bundle, device: Device, graphs: Sequence[Path], folder: Path, options: GenaiOptions, progress: Progress
) -> list[str]:
    """Compile, and return the float nodes; the wrappers of the binaries take the names of the graphs.

    Raises:
        EngineError: the compiler failed, or would compute a node in float.
    """
    together = [graphs] if options.share_weights else [[graph] for graph in graphs]
    sets = [{graph.stem: graph for graph in files} for files in together]
    return floating_in(compile_folder(bundle, GENAI, sets, device, folder, progress, prefix=""))
