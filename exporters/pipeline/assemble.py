"""Puts finished pieces together to a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from devices import Device
from edgekv.bundle import MANIFEST, CompiledBinary, Manifest, atomic_directory, write_manifest
from edgekv.errors import UsageError
from edgekv.machine.system import link_or_copy
from edgekv.qnn import provider as qnn
from exporters.htp.check import float_verdict
from exporters.htp.compile import Watch, unwatched, write_compiled
from exporters.pipeline.inputs import BUNDLE
from exporters.pipeline.pieces import read_compiled, read_manifest
from exporters.pipeline.planning import Exported
from exporters.pipeline.quality import Quality
from exporters.pipeline.store import PieceStore


def assemble(
    exported: Exported,
    device: Device,
    store: PieceStore,
    target: Path,
    *,
    force: bool,
    allow_float: bool = False,
    watch: Watch = unwatched,
) -> Manifest:
    """Put a bundle together.

    Args:
        exported: names of its finished pieces.
        device: the chip.
        store: where they are.
        target: the bundle's folder.
        force: replace an existing bundle.
        allow_float: accept nodes that compute in float, and record them.
        watch: called with the peak RAM of compiling each binary.

    Raises:
        EngineError: a node computes in float.
        UsageError: a piece is missing, damaged, or holds something else.
    """
    binaries = [read_compiled(store, name) for name in exported.binaries]
    floating = {file: nodes for binary in binaries for file, nodes in binary.floating.items()}
    floating |= {file: store.answer(name, list[str]) for file, name in exported.checks.items()}
    manifest = read_manifest(store, exported.write)
    quality = () if exported.quality is None else store.answer(exported.quality, Quality).records
    verdict, nodes = "not-run", list[str]()
    if floating:
        files = manifest.graph_files
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
        changed = msgspec.structs.replace(
            manifest, device=device.soc, htp_check=verdict, floating_nodes=nodes, quality=quality
        )
        write_manifest(folder, changed)
        if binaries:
            compiled = folder / "compiled" / device.soc
            compiled.mkdir(parents=True)
            take_binaries(exported.binaries, store, compiled, watch)
            plain = [_plain(each) for each in binaries]
            write_compiled(compiled, device, plain, qnn.compiler(), folder / MANIFEST, floating=nodes)
    return changed


def take_binaries(
    names: Sequence[str], store: PieceStore, folder: Path, watch: Watch = unwatched
) -> list[CompiledBinary]:
    """Copy finished binaries and their wrappers into a folder.

    Raises:
        UsageError: a piece is missing, damaged, or holds something else.
    """
    found = []
    for name in names:
        binary = read_compiled(store, name)
        for file, path in store.files(name).items():
            link_or_copy(path, folder / file)
        if binary.peak_bytes is not None:
            watch(binary.file, binary.peak_bytes)
        found.append(_plain(binary))
    return found


def _plain(binary: CompiledBinary) -> CompiledBinary:
    """What a manifest says of a binary."""
    return CompiledBinary(
        file=binary.file, wrappers=binary.wrappers, graphs=binary.graphs, optimization=binary.optimization
    )
