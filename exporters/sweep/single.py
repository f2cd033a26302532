"""One export or one compilation on a cluster: `edgekv export --scheduler`, `edgekv compile --scheduler`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from devices import Device
from edgekv import qnn
from edgekv.bundle import MANIFEST, Bundle, CompiledBinary, CompiledManifest, Manifest, check_target
from edgekv.errors import UsageError
from edgekv.runtime import HtpOptions
from edgekv.system import link_or_copy, sha256_of
from exporters.htp.compile import Watch, binary_sets, compile_bundle, device_parts
from exporters.options import ExportOptions
from exporters.parallel import compiler_bytes
from exporters.preconditions import check_compiler
from exporters.resources import bundle_bytes
from exporters.sweep.bundles import assemble
from exporters.sweep.carry import Where, carry_out, fitness_for
from exporters.sweep.piece import Piece, Plan, hashed
from exporters.sweep.planning import Planner
from exporters.sweep.run import unfinished
from exporters.sweep.source import prepared_for
from exporters.sweep.store import PieceStore
from exporters.sweep.work import BUNDLE, CompileWork, read_compiled


def export_on(checkpoint: str, target: Path, options: ExportOptions, where: Where, *, force: bool) -> Manifest:
    """Export on a cluster: the same bytes as on one machine.

    Args:
        checkpoint: a path that all workers see, or a hub id.
        target: the bundle's folder; it appears atomically.
        options: of the export.
        where: the cluster, and the store of the pieces.
        force: replace an existing bundle.

    Raises:
        UsageError: the options do not fit the checkpoint or a cluster, or the target exists.
        ServiceError: the scheduler cannot be reached, or vanished.
        EngineError: the compiler is not installed, refused a graph, or computes part of it in float.
    """
    check_target(target, force=force)
    check_compiler(options)
    local = {"--format tflite": options.graph_format == "tflite", "--learn-rounding": bool(options.learn_tokens)}
    local["--lora-calibrate"] = options.lora is not None and bool(options.lora.calibrate)
    for option in [name for name, given in local.items() if given]:
        raise UsageError("--scheduler", got=f"it with {option}", expected="one of both", fix=f"Leave {option} out.")
    if options.calibration is not None:
        options = replace(options, calibration=options.calibration.absolute())
    planner = Planner(checkpoint, divide=where.divide)
    exported, store = planner.export(options), _store(where)
    pieces = unfinished(planner.plan, store, exported.keys)
    if pieces:
        prepared = prepared_for(checkpoint, replace(options, check_on_htp=False, compile=False))
        disk_bytes = 2 * bundle_bytes(prepared.checkpoint.spec, options.recipe, len(prepared.graphs))
        fitness = fitness_for(planner.checkpoint, options.calibration, store, _probe(store), disk_bytes)
        carry_out(pieces, len(planner.plan.pieces), store, fitness, where)
    return assemble(exported, options.device, store, target, force=force, allow_float=options.allow_float)


def compile_on(
    bundle: Bundle, device: Device, where: Where, *, each: bool | None, force: bool, watch: Watch, options: HtpOptions
) -> CompiledManifest:
    """Compile a bundle's binaries on a cluster: the same bytes as on one machine.

    Args:
        bundle: what to compile.
        device: the target.
        where: the cluster, and the store of the pieces.
        each: as for `compile_bundle`.
        force: replace earlier binaries.
        watch: called with the peak RAM of the compiler for each.
        options: of the compiler.

    Raises:
        UsageError: as `compile_bundle`.
        ServiceError: the scheduler cannot be reached, or vanished.
        EngineError: the compiler failed.
    """
    manifest = bundle.manifest
    if manifest.graph_format == "tflite":
        raise UsageError("--scheduler", got="it for TFLite graphs", expected="ONNX graphs", fix="Leave it out.")
    check_target(bundle.path / "compiled" / device.soc, force=force, marker="compiled.json")
    store, compiler = _store(where), qnn.compiler()
    key = hashed("bundle", sha256_of(bundle.path / MANIFEST))

    def copy(folder: Path) -> None:
        for name in [*manifest.files, MANIFEST]:
            place = folder / BUNDLE / name
            place.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(bundle.path / name, place)

    store.make(key, "bundle", copy)
    works, plan = dict[tuple[str, ...], str](), dict[str, Piece]()
    sets = binary_sets(device_parts(manifest.graphs, Path()), each=manifest.is_whole if each is None else each)
    weights_bytes = sum(manifest.files[name].bytes for name in manifest.weights.files)
    for models in sets:
        files = tuple((name, path.name) for name, path in models.items())
        piece = hashed("compile", key, files, device.soc, compiler, dict(options.provider_options))
        ram_bytes = compiler_bytes([bundle.path / file for _, file in files])
        plan[piece] = Piece("compile", piece, (), ram_bytes, CompileWork(key, files, device.soc, options))
        works[tuple(models)] = piece
    pieces = unfinished(Plan(plan), store, [*plan])
    if pieces:
        carry_out(pieces, len(plan), store, fitness_for(None, None, store, key, weights_bytes), where)

    def take(
        device: Device,
        models: Mapping[str, Path],
        folder: Path,
        *,
        prefix: str,
        watch: Watch,
        options: HtpOptions,
    ) -> CompiledBinary:
        piece = works[tuple(models)]
        made = read_compiled(store, piece)
        for name, path in store.files(piece).items():
            link_or_copy(path, folder / name)
        watch(made.file, made.peak_bytes)
        return CompiledBinary(file=made.file, wrappers=made.wrappers, graphs=made.graphs)

    return compile_bundle(
        bundle, device, each=each, force=force, progress=where.progress, watch=watch, make=take, options=options
    )


def _store(where: Where) -> PieceStore:
    store = PieceStore(where.store or str((where.folder / "pieces").absolute()))
    store.check()
    return store


def _probe(store: PieceStore) -> str:
    """A piece that every worker must see."""
    key = hashed("probe")
    store.make(key, "probe", lambda folder: None)
    return key
