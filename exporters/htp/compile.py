"""From ONNX graphs to a context binary for one chip."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from devices import Device
from edgekv.bundle import COMPILED, CompiledBinary, CompiledManifest, GraphRecord, record_files
from edgekv.errors import EngineError
from edgekv.machine.json_file import readable_json
from edgekv.machine.system import MIB, sha256_of
from edgekv.qnn.options import FASTEST, HtpOptions
from edgekv.qnn.worker import HtpStep, context_config
from edgekv.spec import ExpertSteps
from exporters.htp.binary import check_chip, count_graphs
from exporters.htp.check import run_and_lint, run_steps

COMPILER_DEFAULTS = HtpOptions()
DEFAULT_LEVEL = 3
"""Of optimization. The simulated schedules of binaries are 2 to 45 % shorter than at 2, the compiler's own default."""

Watch = Callable[[str, int], None]
"""Called with the name of a binary and the peak RAM of its compiler, in bytes."""


def unwatched(binary: str, peak_bytes: int) -> None:
    """No-op callback."""


Lint = Callable[[str, list[str]], None]
"""Called with the file of a graph and its float nodes, named as by `exporters.htp.check.floating_nodes`."""


def write_compiled(
    folder: Path,
    device: Device,
    binaries: Sequence[CompiledBinary],
    compiler: str,
    manifest: Path,
    options: HtpOptions = COMPILER_DEFAULTS,
    *,
    floating: Sequence[str] = (),
    expert_steps: ExpertSteps | None = None,
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
        floating_nodes=list(floating),
        files=record_files(folder),
        expert_steps=expert_steps,
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


def binary_sets(parts: Sequence[Mapping[str, Path]], *, per_graph_binaries: bool) -> list[dict[str, Path]]:
    """The graphs of each binary: with `each` every graph alone, then those of a part together."""
    sets = []
    for models in parts:
        if per_graph_binaries or len(models) == 1:
            sets += [{name: model} for name, model in models.items()]
        if len(models) > 1:
            sets.append(dict(models))
    return sets


def context_steps(models: Sequence[Path], wrappers: Sequence[str], folder: Path, options: HtpOptions) -> list[HtpStep]:
    """The sessions that write these graphs into one binary, and a wrapper for each, into a folder.

    The provider writes a shared binary at the last session, named after the first.
    """
    provider_options = dict(with_level(options).provider_options)
    steps = []
    for number, (model, wrapper) in enumerate(zip(models, wrappers, strict=True), 1):
        config = context_config(folder.absolute() / wrapper)  # the worker changes its folder
        if len(models) > 1:
            config["ep.share_ep_contexts"] = "1"
            if number == len(models):
                config["ep.stop_share_ep_contexts"] = "1"
        steps.append(HtpStep(model=str(model), session_config=config, provider_options=provider_options))
    return steps


def with_level(options: HtpOptions) -> HtpOptions:
    """The options with the level of optimization that none stands for."""
    return options if options.optimization is not None else replace(options, optimization=DEFAULT_LEVEL)


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
    steps = context_steps([*models.values()], [*wrappers.values()], folder, options)
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
    check_chip(binary, device, options.vtcm_mb)
    watch(binary.name, peak_bytes)
    level = with_level(options).optimization
    assert level != FASTEST, "provider options have no such level"
    return CompiledBinary(file=binary.name, wrappers=wrappers, graphs=held, optimization=level)
