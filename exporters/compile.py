"""From a bundle's graphs to context binaries for one chip."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from devices import Device
from edgekv.bundle import (
    COMPILED,
    MANIFEST,
    Bundle,
    CompiledBinary,
    CompiledManifest,
    atomic_directory,
    record_files,
    sha256_of,
)
from edgekv.engine import qnn
from edgekv.errors import EngineError, UsageError
from exporters.htp import HtpStep, run_steps
from exporters.progress import Progress, silent

_TARGET = re.compile(rb"soc_type=(\w+);arch=(\d+);[\x20-\x7e]*?vtcm_size=(\d+)")
_GRAPH = re.compile(rb"PICKLE/")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class BinaryTarget:
    """The chip that a context binary was compiled for.

    Attributes:
        soc: part number.
        arch: HTP version.
        vtcm_bytes: tightly coupled memory.
    """

    soc: str
    arch: int
    vtcm_bytes: int


def compile_bundle(
    bundle: Bundle, device: Device, *, force: bool = False, progress: Progress = silent
) -> CompiledManifest:
    """Write `compiled/<SOC>/` into the bundle: a context binary for each graph and one that shares weights.

    TFLite graphs become one `.tflite` file that calls such a context.

    The binaries are searched for the chip they target; the shared one also for the number of its graphs.

    Raises:
        UsageError: the device cannot run the bundle, or was compiled for before.
        EngineError: the compiler failed, or targeted something else.
    """
    manifest = bundle.manifest
    if not device.supports_kv(manifest.kv_dtype):
        raise UsageError(
            "--device",
            found=f"{device.soc} (V{device.arch})",
            wanted=f"V73 or later, for the bundle's {manifest.kv_dtype} cache",
            way_out="Export with --kv u8, or compile for a later device.",
        )
    models = {graph.name: bundle.graph_path(graph) for graph in manifest.graphs if graph.role != "score"}
    target = bundle.path / "compiled" / device.soc
    with atomic_directory(target, force=force, marker=COMPILED) as folder:
        if manifest.graph_format == "tflite":
            binary, compiler = _compile_tflite(models, device, folder, progress)
            binaries = [binary]
        else:
            binaries, compiler = compile_binaries(models, device, folder, progress), qnn.compiler()
        compiled = CompiledManifest(
            soc=device.soc,
            soc_model=device.soc_model,
            arch=device.arch,
            vtcm_bytes=device.vtcm_mb * _MIB,
            compiler=compiler,
            bundle_sha256=sha256_of(bundle.path / MANIFEST),
            binaries=binaries,
            files=record_files(folder),
        )
        (folder / COMPILED).write_bytes(msgspec.json.format(msgspec.json.encode(compiled), indent=1) + b"\n")
    return compiled


def _compile_tflite(
    models: Mapping[str, Path], device: Device, folder: Path, progress: Progress
) -> tuple[CompiledBinary, str]:
    """One `.tflite` file that holds a context of these signatures of another, and the compiler."""
    from exporters.tflite.compile import compile_tflite, compiler  # its packages are optional

    (source,) = set(models.values())
    progress("compile", 0, 1)
    compile_tflite(source, folder / source.name, list(models), device)
    _check_target(folder / source.name, device)
    progress("compile", 1, 1)
    return CompiledBinary(file=source.name, wrappers=dict.fromkeys(models, source.name), graphs=len(models)), compiler()


def compile_binaries(
    models: Mapping[str, Path], device: Device, folder: Path, progress: Progress = silent
) -> list[CompiledBinary]:
    """Compile graphs into a folder: a binary for each and, if there are several, one that shares weights, last.

    Args:
        models: ONNX files by the names of their graphs, all over the same weights.
        device: the target; every binary is searched for it.
        folder: where the binaries and their wrappers go.
        progress: told of each binary.

    Raises:
        EngineError: the compiler failed, or targeted something else.
    """
    sets = [{name: model} for name, model in models.items()]
    if len(models) > 1:
        sets.append(dict(models))
    binaries = []
    for done, part in enumerate(sets):
        progress("compile", done, len(sets))
        binaries.append(compile_graphs(device, part, folder, prefix="shared_" if len(part) > 1 else ""))
    progress("compile", len(sets), len(sets))
    return binaries


def compile_graphs(device: Device, models: Mapping[str, Path], folder: Path, *, prefix: str = "") -> CompiledBinary:
    """One binary for these graphs, checked for its target and for the number of its graphs.

    The provider writes a shared binary at the last session, named after the first.

    Args:
        device: the target.
        models: the ONNX files, by the names of their graphs.
        folder: for the binary and its wrappers.
        prefix: of their names.

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
            "ep.context_file_path": str(folder / wrappers[name]),
        }
        if len(models) > 1:
            config["ep.share_ep_contexts"] = "1"
            if name == names[-1]:
                config["ep.stop_share_ep_contexts"] = "1"
        steps.append(HtpStep(model=str(model), session_config=config))
    run_steps(device, steps)
    binary = folder / f"{Path(wrappers[names[0]]).stem}_qnn.bin"
    if not binary.is_file():
        raise EngineError(
            f"compiling {binary.stem}",
            found=f"no {binary.name}",
            wanted="a context binary",
            way_out="Use the tested onnxruntime-qnn, `pip install edgekv[htp]`.",
        )
    held = len(_GRAPH.findall(binary.read_bytes()))
    if held != len(models):
        raise EngineError(
            binary.name,
            found=f"{held} graphs",
            wanted=len(models),
            way_out="Use the tested onnxruntime-qnn, `pip install edgekv[htp]`.",
        )
    _check_target(binary, device)
    return CompiledBinary(file=binary.name, wrappers=wrappers, graphs=held)


def read_target(binary: Path) -> BinaryTarget | None:
    """What a binary itself says that it is for; none if it says nothing."""
    match = _TARGET.search(binary.read_bytes())
    return None if match is None else BinaryTarget(match[1].decode(), int(match[2]), int(match[3]))


def _check_target(binary: Path, device: Device) -> None:
    """The binary itself must say that it is for this device."""
    found = read_target(binary)
    wanted = BinaryTarget(device.soc, device.arch, device.vtcm_mb * _MIB)
    if found != wanted:
        raise EngineError(
            f"target of {binary.name}",
            found="no soc_type in the binary" if found is None else _in_words(found),
            wanted=_in_words(wanted),
            way_out="The compiler did not take the target: use the tested version, `pip install edgekv[htp]`.",
        )


def _in_words(target: BinaryTarget) -> str:
    return f"{target.soc}, V{target.arch}, {target.vtcm_bytes // _MIB} MiB VTCM"
