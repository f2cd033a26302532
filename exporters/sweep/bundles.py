"""Puts finished pieces together: a bundle, and what is known about it."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from devices import Device
from edgekv import qnn
from edgekv.bundle import MANIFEST, CompiledBinary, Manifest, atomic_directory, write_manifest
from edgekv.errors import UsageError
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
from exporters.sweep.store import PieceStore
from exporters.sweep.work import BUNDLE, read_bundle_manifest, read_compiled


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
        UsageError: a piece is missing, damaged, or holds something else.
    """
    binaries = [read_compiled(store, key) for key in exported.binaries]
    floating = {file: nodes for binary in binaries for file, nodes in binary.floating.items()}
    floating |= {file: store.answer(key, list[str]) for file, key in exported.checks.items()}
    manifest = read_bundle_manifest(store, exported.write)
    verdict, nodes = "not-run", list[str]()
    if floating:
        files = dict.fromkeys(part.file for graph in manifest.graphs for part in graph.parts)
        if unchecked := [file for file in files if file not in floating]:
            raise UsageError(
                f"pieces of {target.name}",
                got=f"no float check of {unchecked[0]}",
                expected="one of each graph",
                fix=f"Remove {', '.join(exported.binaries)} from {store.place}, and run the same command again.",
            )
        every = [node for file in files for node in floating[file]]
        verdict, nodes = float_verdict(every, allow_float=allow_float)
    with atomic_directory(target, force=force) as folder:
        for name, path in store.files(exported.write).items():
            inner = name.removeprefix(f"{BUNDLE}/")
            if inner not in (name, MANIFEST):
                place = folder / inner
                place.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(path, place)
        changed = msgspec.structs.replace(manifest, device=device.soc, htp_check=verdict, floating_nodes=nodes)
        write_manifest(folder, changed)
        if binaries:
            compiled = folder / "compiled" / device.soc
            compiled.mkdir(parents=True)
            for key in exported.binaries:
                for name, path in store.files(key).items():
                    link_or_copy(path, compiled / name)
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
    seconds = sum(store.seconds(key) for key in plan.under(member.exported.keys))
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
        export_seconds=round(seconds, 3),
        evaluation=store.answer(member.evaluate, Evaluation),
        layers=store.answer(member.error, LayerErrors).layers,
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
