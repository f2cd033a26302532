"""From a bundle's graphs to context binaries for one chip."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from devices import Device
from edgekv import qnn
from edgekv.bundle import (
    COMPILED,
    MANIFEST,
    Bundle,
    CompiledBinary,
    CompiledManifest,
    GraphRecord,
    atomic_directory,
    readable_json,
    record_files,
)
from edgekv.errors import EngineError, UsageError
from edgekv.runtime import HtpOptions
from edgekv.system import MIB, sha256_of
from exporters.htp.binary import check_target, count_graphs
from exporters.htp.check import HtpStep, run_and_lint, run_steps
from exporters.parallel import Job, compiler_bytes, side_by_side
from exporters.progress import Progress, silent

COMPILER_DEFAULTS = HtpOptions()

Watch = Callable[[str, int], None]
"""Called with the name of a binary and the peak RAM of its compiler, in bytes."""


def unwatched(binary: str, peak_bytes: int) -> None:
    """No-op callback."""


Lint = Callable[[str, list[str]], None]
"""Called with the file of a graph and its float nodes, named as by `exporters.htp.check.floating_nodes`."""


class MakeBinary(Protocol):
    """Compiles graphs into one binary, as `compile_graphs` does."""

    def __call__(
        self,
        device: Device,
        models: Mapping[str, Path],
        folder: Path,
        *,
        prefix: str,
        watch: Watch,
        options: HtpOptions,
    ) -> CompiledBinary: ...


def compile_bundle(
    bundle: Bundle,
    device: Device,
    *,
    each: bool | None = None,
    force: bool = False,
    progress: Progress = silent,
    watch: Watch = unwatched,
    make: MakeBinary | None = None,
    options: HtpOptions = COMPILER_DEFAULTS,
) -> CompiledManifest:
    """Write `compiled/<SOC>/` into the bundle: one context binary per part, in which all graphs share its weights.

    TFLite graphs become one `.tflite` file that calls such a context. The target chip is read back from each binary,
    and from shared ones the number of graphs.

    Args:
        bundle: what to compile.
        device: the target.
        each: also write one binary per graph. The emulator on x86 loads only these; a phone needs none, and they double
            the compile time. None: yes, unless the layers are split into parts, which are too large for the
            emulator.
        force: replace earlier binaries.
        progress: called for each binary.
        watch: called with the peak RAM of each. It is not stored, so that compiling again writes the same bytes.
        make: compiles one binary; None for `compile_graphs`.
        options: of the compiler.

    Raises:
        UsageError: options that are not for compiling, or the device cannot run the bundle, was compiled for before, or
            `each` does not fit the bundle.
        EngineError: the compiler failed, or targeted something else.
    """
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
    if manifest.graph_format == "tflite" and each is not None:
        raise UsageError(
            "--each/--no-each",
            got="one of them for a bundle of TFLite graphs",
            expected="neither: they are compiled into one file",
            fix="Leave it out.",
        )
    target = bundle.path / "compiled" / device.soc
    with atomic_directory(target, force=force, marker=COMPILED) as folder:
        if manifest.graph_format == "tflite":
            (models,) = device_parts(manifest.graphs, bundle.path)
            binary, compiler = _compile_tflite(models, device, folder, progress)
            binaries = [binary]
        else:
            alone = manifest.is_whole if each is None else each
            parts, compiler = device_parts(manifest.graphs, bundle.path), qnn.compiler()
            binaries = compile_binaries(parts, device, folder, alone, progress, watch, make, options)
        progress("seal", 0, 1)
        compiled = write_compiled(folder, device, binaries, compiler, bundle.path / MANIFEST, options)
    progress("seal", 1, 1)
    return compiled


def write_compiled(
    folder: Path,
    device: Device,
    binaries: Sequence[CompiledBinary],
    compiler: str,
    manifest: Path,
    options: HtpOptions = COMPILER_DEFAULTS,
) -> CompiledManifest:
    """Write `compiled.json` beside the binaries of the bundle that has this manifest."""
    compiled = CompiledManifest(
        soc=device.soc,
        soc_model=device.soc_model,
        arch=device.arch,
        vtcm_bytes=(options.vtcm_mb or device.vtcm_mb) * MIB,
        compiler=compiler,
        bundle_sha256=sha256_of(manifest),
        binaries=list(binaries),
        files=record_files(folder),
    )
    (folder / COMPILED).write_bytes(readable_json(compiled))
    return compiled


def device_parts(graphs: Sequence[GraphRecord], folder: Path) -> list[dict[str, Path]]:
    """The files of each part of all graphs, without the scoring graph, which no device needs."""
    stages: dict[range, dict[str, Path]] = {}
    for graph in graphs:
        if graph.role != "score":
            for part in graph.parts:
                stages.setdefault(part.layers, {})[part.name] = folder / part.file
    return [*stages.values()]


def _compile_tflite(
    models: Mapping[str, Path], device: Device, folder: Path, progress: Progress
) -> tuple[CompiledBinary, str]:
    """One `.tflite` file that holds a context of these signatures of another, and the compiler."""
    from exporters.htp.compile_tflite import compile_tflite, compiler  # its packages are optional

    (source,) = set(models.values())
    progress("compile", 0, 1)
    compile_tflite(source, folder / source.name, list(models), device)
    check_target(folder / source.name, device)
    progress("compile", 1, 1)
    return CompiledBinary(file=source.name, wrappers=dict.fromkeys(models, source.name), graphs=len(models)), compiler()


def compile_binaries(
    parts: Sequence[Mapping[str, Path]],
    device: Device,
    folder: Path,
    each: bool,
    progress: Progress = silent,
    watch: Watch = unwatched,
    make: MakeBinary | None = None,
    options: HtpOptions = COMPILER_DEFAULTS,
) -> list[CompiledBinary]:
    """Compile graphs into a folder, each binary in its own process.

    Args:
        parts: for each part, its ONNX files by name, all over the same weights.
        device: the target, which is read back from every binary.
        folder: receives the binaries and their wrappers.
        each: also compile each file into a binary, before the one that shares weights.
        progress: called for each binary.
        watch: called with the peak RAM of each.
        make: compiles one binary; None for `compile_graphs`.
        options: of the compiler.

    Raises:
        EngineError: the compiler failed, or targeted something else.
    """
    compiling = make or compile_graphs
    jobs = []
    for models in binary_sets(parts, each=each):
        prefix = "shared_" if len(models) > 1 else ""
        call = partial(compiling, device, models, folder, prefix=prefix, watch=watch, options=options)
        jobs.append(Job(call, compiler_bytes([*models.values()])))
    return [*side_by_side(jobs, "compile", progress)]


def binary_sets(parts: Sequence[Mapping[str, Path]], *, each: bool) -> list[dict[str, Path]]:
    """The graphs of each binary: with `each` every graph alone, then those of a part together."""
    sets = []
    for models in parts:
        if each or len(models) == 1:
            sets += [{name: model} for name, model in models.items()]
        if len(models) > 1:
            sets.append(dict(models))
    return sets


def compile_graphs(
    device: Device,
    models: Mapping[str, Path],
    folder: Path,
    *,
    prefix: str = "",
    watch: Watch = unwatched,
    lint: Lint | None = None,
    options: HtpOptions = COMPILER_DEFAULTS,
) -> CompiledBinary:
    """One binary for these graphs, checked for its target and for the number of its graphs.

    The provider writes a shared binary at the last session, named after the first.

    Args:
        device: the target.
        models: the ONNX files, by the names of their graphs.
        folder: for the binary and its wrappers.
        prefix: of their names.
        watch: called with the peak RAM.
        lint: called with the float nodes of each file.
        options: of the compiler.

    Raises:
        EngineError: the compiler failed, or targeted something else.
    """
    wrappers = {name: f"{prefix}{name}.onnx" for name in models}
    names = list(models)
    steps = []
    for name, model in models.items():
        config = {
            "ep.context_enable": "1",
            "ep.context_embed_mode": "0",
            "ep.context_file_path": str(folder.absolute() / wrappers[name]),  # the worker changes its folder
        }
        if len(models) > 1:
            config["ep.share_ep_contexts"] = "1"
            if name == names[-1]:
                config["ep.stop_share_ep_contexts"] = "1"
        given = dict(options.provider_options)
        steps.append(HtpStep(model=str(model), session_config=config, provider_options=given))
    if lint is None:
        peak_bytes = run_steps(device, steps)
    else:
        peak_bytes, floating = run_and_lint(device, steps)
        for model, nodes in zip(models.values(), floating, strict=True):
            lint(model.name, nodes)
    binary = folder / f"{Path(wrappers[names[0]]).stem}_qnn.bin"
    if not binary.is_file():
        raise EngineError(
            f"compiling {binary.stem}",
            got=f"no {binary.name}",
            expected="a context binary",
            fix="Use the tested onnxruntime-qnn, `pip install edgekv[htp]`.",
        )
    held = count_graphs(binary)
    if held != len(models):
        raise EngineError(
            binary.name,
            got=f"{held} graphs",
            expected=len(models),
            fix="Use the tested onnxruntime-qnn, `pip install edgekv[htp]`.",
        )
    check_target(binary, device, options.vtcm_mb)
    watch(binary.name, peak_bytes)
    return CompiledBinary(file=binary.name, wrappers=wrappers, graphs=held)
