"""Writing the folder that Genie loads from a bundle."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from msgspec import UNSET, structs

from edgekv.bundle import ENCODER, Bundle, CompiledBinary, EmbeddingTable, GraphRecord, PartRecord, atomic_directory
from edgekv.machine.json_file import readable_json
from edgekv.machine.scratch import scratch_folder
from edgekv.qnn import provider as qnn
from edgekv.runtime import HtpEngine
from edgekv.spec import PIXELS_PORT
from exporters.capabilities import GENIE
from exporters.compile import compile_folder, floating_in
from exporters.graphs.parts import all_rows, build_part, save_part
from exporters.graphs.qdq import GraphForm
from exporters.htp.compile import binary_sets
from exporters.progress import Progress, silent
from exporters.targets.genie.config import (
    CONFIG,
    ENCODER_BINARY,
    EXTENSIONS,
    GENERATOR_NODE,
    IMAGE_NODE,
    LAYER_TABLE,
    SHARED_CONFIG,
    SHARED_GENERATOR_NODE,
    TABLE,
    TEXT_NODE,
    GenieConfig,
    HtpExtensions,
    Nodes,
    genie_config,
)
from exporters.targets.genie.dialog import find_library
from exporters.targets.genie.folder import (
    GENIE_MANIFEST,
    STATE,
    GenieGraph,
    GenieManifest,
    GenieSink,
    GenieVision,
    reads_adapters,
    write_adapters,
    write_state,
)
from exporters.targets.genie.options import GenieOptions
from exporters.targets.genie.plan import GeniePlan, name_graphs
from exporters.targets.genie.ports import GeniePorts, read_ports
from exporters.targets.genie.proof import Continuation, prove_in_genie, prove_pictures
from exporters.targets.record import write_record
from quant import Encoding

_TOKENIZER = "tokenizer.json"
_CHECKED_TOKENS = 8
_ROWS_AT_ONCE = 8192


def write_genie(
    bundle: Bundle, target: Path, options: GenieOptions, *, force: bool = False, progress: Progress = silent
) -> GenieManifest:
    """Check a bundle's graphs, compile them, write Genie's configuration, and let Genie itself load the result.

    Args:
        bundle: with keys in rows or in columns.
        target: the folder; it appears complete or not at all.
        options: see `GenieOptions`.
        force: replace a folder that was written before.
        progress: called for each stage.

    Raises:
        UsageError: an option does not fit the bundle, or the target exists.
        BundleError: Genie cannot express something of the bundle, or would misread a graph.
        EngineError: Genie or the compiler is missing, failed, or chose other tokens.
    """
    plan, manifest = GeniePlan.of(bundle, options), bundle.manifest
    find_library()
    with (
        atomic_directory(target, force=force, marker=GENIE_MANIFEST) as folder,
        scratch_folder("genie") as scratch,
    ):
        # Genie gathers inputs of layers only beside embeddings.
        of_layers, encoding = bundle.layer_inputs(), None
        looks_up = options.embedding_table or manifest.host_embeds or of_layers is not None
        if looks_up:
            _write_table(bundle.embeddings(), folder / TABLE)
            encoding = manifest.encodings["embedding"]
        if of_layers is not None:
            _write_table(of_layers, folder / LAYER_TABLE)
        parts = [
            _build_part(bundle, plan, part, scratch, looks_up=looks_up, stacked=options.stacked)
            for part in range(1, plan.parts + 1)
        ]
        ports = {
            name: _check_graph(bundle, graph, graph.parts[part - 1], models[name], encoding)
            for part, models in enumerate(parts, 1)
            for name, graph in plan.named(part)
        }
        adapters = write_adapters(bundle, folder)
        sets = binary_sets(parts, per_graph_binaries=options.per_graph_binaries)
        binaries = compile_folder(bundle, options.target, sets, plan.device, folder, progress)
        floating = floating_in(binaries)
        named = {
            name: full
            for binary in binaries
            for name, full in name_graphs(folder, binary, pads_number=options.stacked).items()
        }
        alone = {name: binary for binary in binaries if binary.graphs == 1 for name in binary.wrappers}
        whole = [next(b for b in binaries if b.wrappers.keys() == models.keys()) for models in parts]
        shared = [binary.file for binary in whole] if len(whole) < len(binaries) else []
        holders = {name: binary for binary in whole for name in binary.wrappers} | alone

        def write_config(file: str, listed: Sequence[str]) -> GenieConfig:
            config = genie_config(
                manifest,
                listed,
                context=plan.context,
                bos=plan.bos,
                sampling=options.sampling,
                max_new_tokens=options.max_new_tokens or plan.context,
                table=encoding,
                adapters={adapter.name: adapter.path for adapter in adapters},
            )
            (folder / file).write_bytes(readable_json(config))
            return config

        config = write_config(CONFIG, [*dict.fromkeys(binary.file for binary in holders.values())])
        vision = _vision(bundle)
        if vision is not None:
            _write_nodes(folder, config, TEXT_NODE, IMAGE_NODE, GENERATOR_NODE)
            encoder, nodes = _compile_encoder(bundle, plan, folder, scratch, progress)
            floating += nodes
        if shared:
            with_weights_once = write_config(SHARED_CONFIG, shared)
            if vision is not None:
                _write_nodes(folder, with_weights_once, TEXT_NODE, IMAGE_NODE, SHARED_GENERATOR_NODE)
        (folder / EXTENSIONS).write_bytes(readable_json(HtpExtensions.of(plan.device)))
        shutil.copyfile(bundle.path / _TOKENIZER, folder / _TOKENIZER)
        if plan.sink is not None:
            write_state(folder / STATE, manifest, plan.sink)
        if options.check:
            progress("check on Genie", 0, 1)
            wrappers = {name: folder / binary.wrappers[name] for name, binary in alone.items()}
            # The bundle's own graphs run on Genie's binaries if these read and write the same.
            same_cache = manifest.key_layout == "columns" and not options.stacked and not plan.has_states
            reads_alike = same_cache and (not looks_up or manifest.host_embeds) and not adapters
            compiled = plan.compiled(bundle, wrappers)
            engine = HtpEngine(plan.device, compiled) if reads_alike else HtpEngine.on(plan.device, bundle)
            if vision is not None:
                engine = replace(engine, compiled={**engine.compiled, **encoder})
            prompt = _prompt(bundle, plan)
            count = min(_CHECKED_TOKENS, plan.context - len(plan.first) - len(prompt))
            state = None if plan.sink is None else folder / STATE
            graphs = {named[name]: ports[name] for name in ports}
            states = {adapter.name: None if adapter.state is None else folder / adapter.state for adapter in adapters}
            continuation = Continuation(plan.first, state, prompt, count, states)
            dialog = prove_in_genie(folder, config, graphs, bundle, engine, continuation)
            if vision is not None:
                prove_pictures(folder, dialog, vision, bundle, engine, _CHECKED_TOKENS, plan.context)
            progress("check on Genie", 1, 1)
        _remove_wrappers(folder, binaries)
        return write_record(
            GenieManifest,
            folder,
            GENIE_MANIFEST,
            bundle,
            soc=plan.device.soc,
            checked=options.check,
            floating=floating,
            arch=plan.device.arch,
            compiler=qnn.compiler(),
            context=plan.context,
            graphs=[
                GenieGraph(name=named[name], file=holders[name].file, part=part, ar=graph.ar, context=graph.context)
                for part in range(1, plan.parts + 1)
                for name, graph in plan.named(part)
            ],
            shared=shared,
            sink=None if plan.sink is None else _sink(bundle, plan.sink.tokens),
            adapters=adapters or UNSET,
            vision=UNSET if vision is None else vision,
        )


def _vision(bundle: Bundle) -> GenieVision | None:
    if (vision := bundle.manifest.vision) is None:
        return None
    return GenieVision(encoder=vision.encoder, pictures=vision.pictures, pixels=vision.encodings[PIXELS_PORT])


def _write_nodes(folder: Path, config: GenieConfig, *names: str) -> None:
    for name, content in zip(names, Nodes.of(config.dialog).content(), strict=True):
        (folder / name).write_bytes(content)


def _compile_encoder(
    bundle: Bundle, plan: GeniePlan, folder: Path, scratch: Path, progress: Progress
) -> tuple[dict[Path, Path], list[str]]:
    """Write the binary of the vision encoder; answers its wrapper, by the bundle's graph, and its float nodes."""
    assert bundle.manifest.vision is not None, "it has one"
    graph, compiled = bundle.path / bundle.manifest.vision.file, scratch / "encoder"
    compiled.mkdir()
    (binary,) = compile_folder(bundle, GENIE, [{ENCODER: graph}], plan.device, compiled, progress)
    shutil.copyfile(compiled / binary.file, folder / ENCODER_BINARY)
    return {graph: compiled / binary.wrappers[ENCODER]}, floating_in([binary])


def _write_table(table: EmbeddingTable, path: Path) -> None:
    """Write rows as Genie reads them: 16 bits an element, in one encoding."""
    with path.open("wb") as file:
        for first in range(0, len(table.scales), _ROWS_AT_ONCE):
            file.write(table.rows(slice(first, first + _ROWS_AT_ONCE)).data)


def _build_part(
    bundle: Bundle, plan: GeniePlan, number: int, scratch: Path, *, looks_up: bool, stacked: bool
) -> dict[str, Path]:
    """One part of the graphs to compile, by their names: with the logits of all rows and keys in columns.

    Args:
        bundle: the bundle.
        plan: its graphs.
        number: of the part, from 1 on.
        scratch: takes the graphs.
        looks_up: whether Genie looks embeddings up.
        stacked: whether the heads of a layer are one tensor.
    """
    models = {}
    for name, graph in plan.named(number):
        part = graph.parts[number - 1]
        form = GraphForm(
            stacks_heads=stacked and bool(part.layers),
            unsigned_adapters=reads_adapters(bundle),
            whole_states=plan.has_states,
        )
        own_part = structs.replace(part, embeds=part.embeds and not looks_up)
        built = build_part(bundle.manifest, all_rows(graph), own_part, form, key_layout="columns")
        models[name] = scratch / f"{name}.onnx"
        save_part(built, models[name], bundle.path)
    return models


def _check_graph(
    bundle: Bundle, graph: GraphRecord, part: PartRecord, model: Path, table: Encoding | None
) -> GeniePorts:
    ports = GeniePorts.of(bundle.manifest, graph, part, table, unsigned_adapters=reads_adapters(bundle))
    ports.check_encodings(part.file)
    actual = read_ports(model)
    is_stacked = len(actual.outputs) < len(ports.outputs)
    (ports.stacked() if is_stacked else ports).compare(part.file, actual)
    return ports.stacked(axis=1) if is_stacked else ports


def _prompt(bundle: Bundle, plan: GeniePlan) -> list[int]:
    """Tokens of a text after `plan.first`; two steps of the prefill graph if the context has room for them."""
    ar = max(graph.ar for graph in plan.graphs.values())
    text = resources.files("exporters.quantize").joinpath("calibration.txt").read_text("utf-8")
    tokens = list(bundle.tokenizer().encode(text[: 64 * ar], add_special_tokens=False).ids)
    return tokens[: min(ar + _CHECKED_TOKENS, plan.context - ar) - len(plan.first)]


def _sink(bundle: Bundle, tokens: Sequence[int]) -> GenieSink:
    text = bundle.tokenizer().decode(list(tokens), skip_special_tokens=False)
    return GenieSink(tokens=list(tokens), text=text, state=STATE)


def _remove_wrappers(folder: Path, binaries: Sequence[CompiledBinary]) -> None:
    for binary in binaries:
        for wrapper in binary.wrappers.values():
            (folder / wrapper).unlink()
