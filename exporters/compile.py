"""Context binaries of a bundle for a chip, as pieces: what is finished is not compiled again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from devices import Device
from edgekv.bundle import (
    COMPILED,
    ENCODER,
    MANIFEST,
    Bundle,
    CompiledManifest,
    atomic_directory,
    check_new,
    file_hashes,
)
from edgekv.errors import UsageError
from edgekv.machine.scratch import scratch_folder
from edgekv.qnn import provider as qnn
from edgekv.qnn.options import FASTEST, HtpOptions
from exporters.capabilities import ENGINE, Capabilities
from exporters.graphs.divided import check_divisible, write_divided
from exporters.graphs.parts import stored_graph, weight_files
from exporters.htp.compile import COMPILER_DEFAULTS, Watch, binary_sets, device_parts, unwatched, write_compiled
from exporters.htp.compile_tflite import compiler as tflite_compiler
from exporters.options import RunOptions
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.piece import Plan
from exporters.pipeline.pieces import CompileResult, read_compiled
from exporters.pipeline.planning import give_bundle, plan_binaries, plan_tflite
from exporters.pipeline.serial import run_serial
from exporters.pipeline.store import PieceStore, store_in
from exporters.pipeline.write import take_binaries
from exporters.preconditions import check_encoder_fits
from exporters.progress import Progress, one_step, silent


@dataclass(frozen=True, slots=True)
class BinaryChoice:
    """Which binaries are compiled.

    Attributes:
        per_graph: also write one binary per graph. The emulator on x86 loads only these; a phone needs none, and they
            double the compile time. None: yes, unless the layers are split into parts, which are too large for the
            emulator.
        divides_experts: divide decode graphs at the routers of experts, so that a step reads those alone that a router
            has chosen, as inputs of one graph.
    """

    per_graph: bool | None = None
    divides_experts: bool = False


USUAL = BinaryChoice()
_PLAIN = RunOptions()
_RESUMED = RunOptions(resume=True)


def compile_bundle(
    bundle: Bundle,
    device: Device,
    run: RunOptions = _PLAIN,
    *,
    choice: BinaryChoice = USUAL,
    force: bool = False,
    progress: Progress = silent,
    watch: Watch = unwatched,
    options: HtpOptions = COMPILER_DEFAULTS,
) -> CompiledManifest:
    """Write `compiled/<SOC>/` into the bundle: one context binary per part, in which all graphs share its weights.

    TFLite graphs become one `.tflite` file that calls such a context. The target chip is read back from each binary,
    and from shared ones the number of graphs.

    Args:
        bundle: what to compile.
        device: the target.
        run: where and how the work is done.
        choice: which binaries.
        force: replace earlier binaries.
        progress: called for each binary.
        watch: called with the peak RAM of each. It is not stored, so that compiling again writes the same bytes.
        options: of the compiler.

    Raises:
        UsageError: options that are not for compiling, or the device cannot run the bundle, was compiled for before, or
            the choice does not fit the bundle.
        ServiceError: the scheduler cannot be reached, or vanished.
        EngineError: the compiler failed, targeted something else, or would compute a node in float that the export did
            not allow.
    """
    _check(bundle, device, options, choice, run)
    target = bundle.path / "compiled" / device.soc
    check_new(target, force=force, marker=COMPILED)
    whole = [graph for graph in bundle.manifest.graphs if not (choice.divides_experts and graph.role == "decode")]
    parts, plan, store = device_parts(whole, bundle.path), Plan(), open_store(run)
    inputs, steps = Inputs(store, None, progress), None
    bundle_files = give_bundle(plan, bundle)
    vision = bundle.manifest.vision
    encoder = [] if vision is None else [{ENCODER: bundle.path / vision.file}]
    with scratch_folder("divided") as scratch:
        if bundle.manifest.graph_format == "tflite":
            compiler = tflite_compiler()
            names = [plan_tflite(plan, bundle_files, models, device, compiler) for models in (parts[0], *encoder)]
        else:
            alone, compiler = bundle.manifest.is_whole if choice.per_graph is None else choice.per_graph, qnn.compiler()
            sets = [*binary_sets(parts, per_graph_binaries=alone), *encoder]
            names = []
            for models in sets:
                chosen = _with_found_level(bundle, device, [*models], run, progress, options)
                names += plan_binaries(plan, bundle_files, [models], device, compiler, chosen)
            if choice.divides_experts:
                models, steps = write_divided(bundle, scratch)
                graph_files = _give_folder(plan, inputs, scratch, models)
                chosen = _with_found_level(bundle, device, [], run, progress, options)
                of_graphs = binary_sets([models], per_graph_binaries=alone)
                names += plan_binaries(plan, graph_files, of_graphs, device, compiler, chosen, "shared_divided_")
        if run.cluster is not None:
            from exporters.pipeline.dask.run import run_on  # its packages are optional

            bundle_bytes = sum(file.bytes for file in bundle.manifest.files.values())
            run_on(run.cluster, plan, names, store, None, None, progress, disk_bytes=bundle_bytes)
        else:
            inputs.adopt(bundle_files, bundle.path)
            run_serial(plan, names, inputs, progress, resume=run.resume)
    floating = floating_in([read_compiled(store, name) for name in names])
    ENGINE.check_nodes(bundle, floating)
    with atomic_directory(target, force=force, marker=COMPILED) as folder:
        binaries = take_binaries(names, store, folder, watch)
        with one_step("seal", progress):
            compiled = write_compiled(
                folder,
                device,
                binaries,
                compiler,
                bundle.path / MANIFEST,
                options,
                floating=floating,
                expert_steps=steps,
            )
    if run.removes_pieces:
        store.remove([*names, bundle_files])
    return compiled


def _with_found_level(
    bundle: Bundle, device: Device, parts: Sequence[str], run: RunOptions, progress: Progress, options: HtpOptions
) -> HtpOptions:
    """The options with the fastest level of optimization of a binary, if that is wanted."""
    if options.optimization != FASTEST:
        return options
    from exporters.estimate import fastest_level  # takes a while to import

    graphs = [graph.name for graph in bundle.manifest.graphs if any(part.name in parts for part in graph.parts)]
    usual = replace(options, optimization=None)
    level = fastest_level(bundle, device, graphs, run, progress=progress, options=usual) if graphs else None
    return replace(usual, optimization=level)


def compile_folder(
    bundle: Bundle,
    target: Capabilities,
    sets: Sequence[Mapping[str, Path]],
    device: Device,
    folder: Path,
    progress: Progress = silent,
    *,
    prefix: str = "shared_",
    run: RunOptions = _RESUMED,
) -> list[CompileResult]:
    """Compile graphs that a target has written; binaries that an interrupted run has finished are taken.

    Args:
        bundle: the source of the graphs.
        target: of the graphs.
        sets: the ONNX files of each binary by name, in one folder, over the same weights.
        device: the chip, which is read back from every binary.
        folder: receives the binaries and their wrappers.
        progress: called for each binary.
        prefix: of the names of binaries of several graphs.
        run: where finished binaries are kept.

    Returns:
        The binaries, with the float nodes of each file.

    Raises:
        EngineError: the compiler failed, targeted something else, or would compute a node in float.
    """
    plan, store = Plan(), open_store(run)
    inputs, names, compiler = Inputs(store, None, progress), list[str](), qnn.compiler()
    for models in sets:
        graph_files = _give_folder(plan, inputs, next(iter(models.values())).parent, models)
        names += plan_binaries(plan, graph_files, [models], device, compiler, COMPILER_DEFAULTS, prefix)
    run_serial(plan, names, inputs, progress, resume=run.resume)
    binaries = [read_compiled(store, name) for name in names]
    target.check_nodes(bundle, floating_in(binaries))
    take_binaries(names, store, folder)
    if run.removes_pieces:
        store.remove(names)
    return binaries


def _give_folder(plan: Plan, inputs: Inputs, folder: Path, models: Mapping[str, Path]) -> str:
    """Add a folder with ONNX files and the files of their weights, where it is; returns its name."""
    weights = {name for file in models.values() for name in weight_files(stored_graph(file))}
    with file_hashes() as known:
        files = sorted({*(file.name for file in models.values()), *weights})
        hashes = [(name, known.sha256_of(folder / name)) for name in files]
    name = plan.give(lambda folder: None, "graphs", hashes)
    inputs.adopt(name, folder)
    return name


def floating_in(binaries: Sequence[CompileResult]) -> list[str]:
    """The nodes in binaries that compute in float, each once: a graph may be in two."""
    return [*dict.fromkeys(node for binary in binaries for nodes in binary.floating.values() for node in nodes)]


def _check(bundle: Bundle, device: Device, options: HtpOptions, choice: BinaryChoice, run: RunOptions) -> None:
    manifest = bundle.manifest
    options.check_for_compiling(device)
    if manifest.graph_format == "tflite" and options != COMPILER_DEFAULTS:
        raise UsageError(
            "--htp",
            got="it for a bundle of TFLite graphs",
            expected="none: LiteRT's plugin does not take them",
            fix="Leave it out.",
        )
    if not device.supports_kv(manifest.kv_dtype):
        raise UsageError(
            "--device",
            got=f"{device.soc} (V{device.arch})",
            expected=f"V73 or later, for the bundle's {manifest.kv_dtype} cache",
            fix="Export with --kv u8, or compile for a later device.",
        )
    if manifest.vision is not None:
        check_encoder_fits(device)
    if choice.divides_experts:
        check_divisible(manifest)
        if run.cluster is not None:
            fix = "Leave one of them out."
            raise UsageError("--experts", got="operands with --scheduler", expected="this machine", fix=fix)
    if manifest.graph_format == "tflite" and choice.per_graph is not None:
        raise UsageError(
            "--per-graph-binaries/--no-per-graph-binaries",
            got="one of them for a bundle of TFLite graphs",
            expected="neither: they are compiled into one file",
            fix="Leave it out.",
        )


def open_store(run: RunOptions) -> PieceStore:
    """The store of a command.

    Raises:
        UsageError: it cannot be written, or a cache directory was given that nothing is kept in.
    """
    if run.store is None:
        store = store_in(run.cache_dir)
    else:
        store = PieceStore(run.store, None if run.cache_dir is None else run.cache_dir / "pieces")
        if run.cache_dir is not None and not store.is_remote:
            expected = "one of them: pieces of a folder are used in place"
            raise UsageError("--cache-dir", got="it with a folder as --store", expected=expected, fix="Leave it out.")
    store.check()
    return store
