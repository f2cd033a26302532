"""Writing the folder that onnxruntime-genai loads from a bundle."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from devices import Device
from edgekv.bundle import Bundle, GraphRecord, atomic_directory
from edgekv.engine.sink import read_sink
from edgekv.errors import BundleError, UsageError
from edgekv.machine.json_file import readable_json
from exporters.capabilities import GENAI
from exporters.compile import compile_folder, floating_in
from exporters.graphs.models import save_model
from exporters.graphs.parts import build_part, save_part
from exporters.graphs.qdq import GraphForm, QdqOps
from exporters.progress import Progress, silent
from exporters.targets.genai.config import CONFIG, DEQUANTIZER, POSITION_PROCESSOR, genai_config
from exporters.targets.genai.folder import GENAI_MANIFEST, GenaiManifest
from exporters.targets.genai.helpers import dequantizer, position_processor
from exporters.targets.genai.options import GenaiOptions
from exporters.targets.genai.proof import prove_integers
from exporters.targets.record import copy_tokenizer, write_record


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
            save_part(stacked_graph(bundle, graph), graphs / graph.file, bundle.path)
        if options.check:
            stacked = {graph.name: graphs / graph.file for graph in (decode, prefill)}
            progress("compare", 0, 1)
            prove_integers(bundle, stacked, options.device)
            progress("compare", 1, 1)
        floating = None
        if options.device:
            compiled = [graphs / graph.file for graph in (decode, prefill)]
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
