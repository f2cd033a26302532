"""From a bundle's graphs to context binaries for one chip."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from devices import Device
from edgekv.bundle import MANIFEST, Bundle, FileRecord, atomic_directory, record_files, sha256_of
from edgekv.errors import EngineError, UsageError
from exporters.htp import HtpStep, run_steps
from exporters.progress import Progress, silent

COMPILED = "compiled.json"
_TARGET = re.compile(rb"soc_type=(\w+);arch=(\d+);[\x20-\x7e]*?vtcm_size=(\d+)")
_GRAPH = re.compile(rb"PICKLE/")
_MIB = 1 << 20


class CompiledBinary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One context binary and what it says of itself.

    Attributes:
        file: the binary.
        wrappers: ONNX files with an EPContext node, by graph name; ONNX Runtime loads the binary through them.
        graphs: how many graphs the binary holds.
    """

    file: str
    wrappers: dict[str, str]
    graphs: int


class CompiledManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`compiled.json`, beside the binaries of one chip.

    Attributes:
        soc: part number, as read from the binaries.
        soc_model: the QNN id that was asked for.
        arch: HTP version, as read from the binaries.
        vtcm_bytes: as read from the binaries.
        compiler: the package that compiled, with its version.
        bundle_sha256: hash of the bundle's manifest: binaries of another export are not mistaken for these.
        binaries: one for each graph, then one for all graphs with shared weights.
        files: size and hash of every file.
    """

    soc: str
    soc_model: int
    arch: int
    vtcm_bytes: int
    compiler: str
    bundle_sha256: str
    binaries: list[CompiledBinary]
    files: dict[str, FileRecord]


@dataclass(frozen=True, slots=True)
class _Target:
    soc: str
    arch: int
    vtcm_bytes: int


def compile_bundle(
    bundle: Bundle, device: Device, *, force: bool = False, progress: Progress = silent
) -> CompiledManifest:
    """Write `compiled/<SOC>/` into the bundle: a context binary for each graph and one that shares weights.

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
    graphs = [graph for graph in manifest.graphs if graph.role != "score"]
    target = bundle.path / "compiled" / device.soc
    with atomic_directory(target, force=force, marker=COMPILED) as folder:
        total = len(graphs) + 1
        binaries = []
        for done, graph in enumerate(graphs):
            progress("compile", done, total)
            binaries.append(compile_graphs(device, {graph.name: bundle.graph_path(graph)}, folder))
        progress("compile", len(graphs), total)
        if len(graphs) > 1:
            models = {graph.name: bundle.graph_path(graph) for graph in graphs}
            binaries.append(compile_graphs(device, models, folder, prefix="shared_"))
        progress("compile", total, total)
        compiled = CompiledManifest(
            soc=device.soc,
            soc_model=device.soc_model,
            arch=device.arch,
            vtcm_bytes=device.vtcm_mb * _MIB,
            compiler=f"onnxruntime-qnn {metadata.version('onnxruntime-qnn')}",
            bundle_sha256=sha256_of(bundle.path / MANIFEST),
            binaries=binaries,
            files=record_files(folder),
        )
        (folder / COMPILED).write_bytes(msgspec.json.format(msgspec.json.encode(compiled), indent=1) + b"\n")
    return compiled


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
    steps = []
    for done, (name, model) in enumerate(models.items(), start=1):
        config = {
            "ep.context_enable": "1",
            "ep.context_embed_mode": "0",
            "ep.context_file_path": str(folder / wrappers[name]),
        }
        if len(models) > 1:
            config["ep.share_ep_contexts"] = "1"
            if done == len(models):
                config["ep.stop_share_ep_contexts"] = "1"
        steps.append(HtpStep(model=str(model), session_config=config))
    run_steps(device, steps)
    binary = folder / f"{prefix}{next(iter(models))}_qnn.bin"
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
            wanted=f"{len(models)}",
            way_out="Use the tested onnxruntime-qnn, `pip install edgekv[htp]`.",
        )
    _check_target(binary, device)
    return CompiledBinary(file=binary.name, wrappers=wrappers, graphs=held)


def _check_target(binary: Path, device: Device) -> None:
    """What the binary itself says that it is for."""
    match = _TARGET.search(binary.read_bytes())
    found = None if match is None else _Target(match[1].decode(), int(match[2]), int(match[3]))
    wanted = _Target(device.soc, device.arch, device.vtcm_mb * _MIB)
    if found != wanted:
        raise EngineError(
            f"target of {binary.name}",
            found="no soc_type in the binary" if found is None else _in_words(found),
            wanted=_in_words(wanted),
            way_out="The compiler did not take the target: use the tested version, `pip install edgekv[htp]`.",
        )


def _in_words(target: _Target) -> str:
    return f"{target.soc}, V{target.arch}, {target.vtcm_bytes // _MIB} MiB VTCM"
