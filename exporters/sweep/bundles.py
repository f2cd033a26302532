"""Puts finished pieces together: a bundle, and what is known about it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TypeVar

import msgspec

from devices import Device
from edgekv import qnn
from edgekv.bundle import MANIFEST, CompiledBinary, Manifest, atomic_directory, write_manifest
from edgekv.plan import MemoryLimit, Overrides, estimate_speed, find_subject
from edgekv.plan.cache import CHOICES
from edgekv.plan.fit import demand
from edgekv.system import link_or_copy
from exporters.htp.check import float_verdict
from exporters.htp.compile import write_compiled
from exporters.inspect.tally import Evaluation
from exporters.sweep.combination import Common
from exporters.sweep.piece import Plan
from exporters.sweep.planning import Exported, Member
from exporters.sweep.quality import LayerErrors
from exporters.sweep.result import Result
from exporters.sweep.store import RECORD, PieceStore
from exporters.sweep.work import BUNDLE, Compiled, read_bundle_manifest

T = TypeVar("T")


def assemble(
    exported: Exported, device: Device, store: PieceStore, target: Path, *, force: bool, allow_float: bool = False
) -> Manifest:
    """Put a bundle together; it has the bytes that `edgekv export` writes with the same options.

    Args:
        exported: keys of its finished pieces.
        device: the chip.
        store: where they are.
        target: the bundle's folder.
        force: replace an existing bundle.
        allow_float: accept nodes that compute in float, and record them.

    Raises:
        EngineError: a node computes in float.
    """
    written = store.path(exported.write) / BUNDLE
    binaries = [_answer(store, key, Compiled) for key in exported.binaries]
    floating = {file: nodes for binary in binaries for file, nodes in binary.floating.items()}
    floating |= {file: _answer(store, key, list[str]) for file, key in exported.checks.items()}
    manifest = read_bundle_manifest(store, exported.write)
    files = dict.fromkeys(part.file for graph in manifest.graphs for part in graph.parts)
    verdict, nodes = "not-run", list[str]()
    if floating:
        verdict, nodes = float_verdict([node for file in files for node in floating[file]], allow_float=allow_float)
    with atomic_directory(target, force=force) as folder:
        for path in written.rglob("*"):
            if path.is_file() and path.name != MANIFEST:
                place = folder / path.relative_to(written)
                place.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(path, place)
        changed = msgspec.structs.replace(manifest, device=device.soc, htp_check=verdict, floating_nodes=nodes)
        write_manifest(folder, changed)
        if binaries:
            compiled = folder / "compiled" / device.soc
            compiled.mkdir(parents=True)
            for key in exported.binaries:
                for path in store.path(key).iterdir():
                    if path.name != RECORD:
                        link_or_copy(path, compiled / path.name)
            plain = [CompiledBinary(file=each.file, wrappers=each.wrappers, graphs=each.graphs) for each in binaries]
            write_compiled(compiled, device, plain, qnn.compiler(), folder / MANIFEST)
    return changed


def measure(member: Member, plan: Plan, store: PieceStore, bundle: Path, checkpoint: str, common: Common) -> Result:
    """What is known of a combination whose pieces are finished and whose bundle is in place."""
    combination = member.combination
    subject = find_subject(bundle, Overrides())
    assert subject.decoder is not None and subject.weights is not None, "a bundle says both"
    speed = estimate_speed(subject, subject.decoder, subject.weights, combination.device)
    manifest = read_bundle_manifest(store, member.exported.write)
    exported = [store.find(key) for key in plan.under(member.exported.keys)]
    return Result(
        name=combination.name,
        recipe=combination.recipe_name,
        rotation=combination.rotation,
        kv=combination.kv,
        device=combination.device.soc,
        contexts=list(combination.contexts),
        splits=combination.splits,
        bundle=str(bundle),
        bytes=sum(file.bytes for file in manifest.files.values()),
        ram_bytes=demand(subject, CHOICES[0], MemoryLimit.of_htp()).used_bytes,
        tokens_per_s=speed.tokens_per_s,
        roofline_tokens_per_s=speed.static_roofline_tokens_per_s,
        export_seconds=round(sum(record.seconds for record in exported if record is not None), 3),
        evaluation=_answer(store, member.evaluate, Evaluation),
        layers=_answer(store, member.error, LayerErrors).layers,
        command=_command(member, checkpoint, bundle, common),
    )


def _command(member: Member, checkpoint: str, bundle: Path, common: Common) -> str:
    """Reproduces a bundle; a recipe with another rotation is a file beside the bundles."""
    combination = member.combination
    recipe = combination.recipe_name
    if combination.rotation is not None:
        recipe = str(bundle.parent.parent / "recipes" / f"{combination.recipe.name}.json")
    words = ["edgekv", "export", checkpoint, "-o", combination.name, "--device", combination.device.soc]
    words += ["--recipe", recipe, "--kv", combination.kv, "--context", ",".join(map(str, combination.contexts))]
    if common.ar != Common().ar:
        words += ["--ar", ",".join(map(str, common.ar))]
    if combination.splits is not None:
        words += ["--splits", str(combination.splits)]
    if common.calibration is not None:
        words += ["--calibration", str(common.calibration)]
    if common.calibration_tokens is not None:
        words += ["--calibration-tokens", str(common.calibration_tokens)]
    if not common.check_on_htp:
        words.append("--skip-htp-check")
    elif common.compile:
        words.append("--compile")
    return shlex.join(words)


def _answer(store: PieceStore, key: str, kind: type[T]) -> T:
    record = store.find(key)
    assert record is not None, "its piece is finished"
    return msgspec.json.decode(record.answer, type=kind)
