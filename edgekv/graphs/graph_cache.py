"""Graphs of the CPU, kept in the user's cache folder: building one takes longer than all else in loading it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import onnxruntime as ort

from edgekv.bundle import FileHashes, file_hashes
from edgekv.errors import EngineError
from edgekv.graphs.cpu_mode import BUILDING_EXTRA, RenderedMode, can_build
from edgekv.graphs.processor import processor
from edgekv.graphs.source import PartSource, Source
from edgekv.machine.graph_file import graph_content
from edgekv.machine.program import program_sha256
from edgekv.machine.scratch import atomic_file, held_folder, scratch_folder
from edgekv.machine.steps import step
from edgekv.machine.system import MIB, cache_folder, cache_limit_bytes, read_file

EMULATED = "emulated"
RENDERED = "rendered"
_MAX_FILES = 64
_MAX_RENDERED = 16
_COUNT_BYTES = 4
_INVARIANT = ("batch invariant",)
_LARGEST_BYTES = 256 * MIB
_DIGEST_BYTES = sha256().digest_size


def emulated_bytes(source: PartSource, *, batch_invariant: bool = False) -> bytes:
    """The part's graph for `emulate`, serialized; see `emulated`.

    It is built once for each content of the manifest and each version of the builder, and kept with its own hash. A
    cache folder that cannot be used is ignored. Without the package that builds graphs it is the exported graph, unless
    rows must be alike.
    """
    # The content of weights is not part of the key: they stay in their files.
    kept = cache_folder() / EMULATED / f"{_key(source, *_INVARIANT * batch_invariant)}.onnx"
    with suppress(OSError):
        if (graph := _read(kept)) is not None:
            return graph
    if not batch_invariant and not can_build():
        return graph_content(source.file)
    # Importing onnx takes a third of a second; kept graphs do not need it.
    from edgekv.graphs.build import emulated

    with step(f"build {source.name} for emulate"):
        content: bytes = emulated(source, batch_invariant=batch_invariant).SerializeToString()
    with suppress(OSError):
        _keep(kept, content)
    return content


@contextmanager
def rendered_graph(
    source: Source, mode: RenderedMode, *, batch_invariant: bool = False
) -> Iterator[tuple[bytes, Path]]:
    """The graph of a part or an encoder for a mode, serialized, and the folder of its weights; see `rendered`.

    It is built once for each content of the manifest and the weights, each mode, each version of the builder and of the
    runtime, and each kind of processor. Without a usable cache folder, the weights are removed when the block ends.

    Raises:
        EngineError: it is not kept, and the package that builds graphs is not installed.
    """
    folder = cache_folder() / RENDERED
    with file_hashes() as hashes:
        weights = [hashes.sha256_of(source.folder / name) for name in source.weights.files]
        kept = (
            folder / f"{_key(source, mode, processor(), ort.__version__, *_INVARIANT * batch_invariant, *weights)}.onnx"
        )
        content = _read_rendered(kept, hashes)
    if content is None and not can_build():
        raise EngineError(
            f"{source.name} in the mode {mode}",
            got="no package onnx",
            expected="it: graphs for this mode are built with it",
            fix=f'Run pip install "edgekv[{BUILDING_EXTRA}]", or use the mode emulate.',
        )
    if content is None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            content, names = _render(source, mode, folder, batch_invariant)
            _keep(kept, _with_names(content, names), _MAX_RENDERED)
            _remove_unused(folder)
    if content is not None:
        yield content, folder
        return
    with scratch_folder("graphs") as scratch:
        yield _render(source, mode, scratch, batch_invariant)[0], scratch


def _render(source: Source, mode: RenderedMode, folder: Path, batch_invariant: bool) -> tuple[bytes, tuple[str, ...]]:
    """The serialized model and the names of its weights, which are written to a folder."""
    from edgekv.graphs.build import rendered
    from edgekv.graphs.packed_weights import SCRATCH, pack_weights
    from edgekv.graphs.weight_file import WeightFile

    with held_folder(folder, SCRATCH) as scratch:
        data = scratch / "weights"
        with step(f"build {source.name} for {mode}"), data.open("wb") as file:
            model = rendered(source, mode, WeightFile(file, data.name), batch_invariant=batch_invariant)
        return pack_weights(model.SerializeToString(), scratch, folder)


def _with_names(content: bytes, weights: tuple[str, ...]) -> bytes:
    """A model behind the number and the names of the files of its weights."""
    names = "\n".join(weights).encode()
    return len(names).to_bytes(_COUNT_BYTES, "little") + names + content


def _without_names(content: bytes) -> tuple[bytes, tuple[str, ...]]:
    """What `_with_names` put together; a model of an older version has no names."""
    end = _COUNT_BYTES + int.from_bytes(content[:_COUNT_BYTES], "little")
    if end > len(content):
        return content, ()
    return content[end:], tuple(content[_COUNT_BYTES:end].decode("ascii", "replace").splitlines())


def _read_rendered(kept: Path, hashes: FileHashes) -> bytes | None:
    """A kept model; None if it or its weights are missing or damaged."""
    with suppress(OSError):
        if (rendered := _read(kept)) is not None:
            content, weights = _without_names(rendered)
            if all(hashes.sha256_of(kept.with_name(name)) == Path(name).stem for name in weights):
                os.utime(kept)  # the least recently used are removed
                return content
    return None


def _remove_unused(folder: Path) -> None:
    """Remove the least recently used models above the limit of the cache, and the weights of models that are gone.

    Models share files of weights. The last one stays, however large it is.
    """
    from edgekv.graphs.packed_weights import remove_unused_weights

    used, held_bytes, limit_bytes = set[str](), 0, cache_limit_bytes()
    for path in sorted(folder.glob("*.onnx"), key=lambda path: -path.stat().st_mtime_ns):
        content = _read(path)
        names = () if content is None else _without_names(content)[1]
        new_bytes = path.stat().st_size + sum(_file_bytes(folder / name) for name in {*names} - used)
        if used and held_bytes + new_bytes > limit_bytes:
            path.unlink(missing_ok=True)
        else:
            held_bytes += new_bytes
            used.update(names)
    remove_unused_weights(folder, used)


def _file_bytes(path: Path) -> int:
    """Its size; 0 if another process has removed it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read(kept: Path) -> bytes | None:
    """The content of a kept file; None if it is damaged."""
    content = read_file(kept, _LARGEST_BYTES)
    digest, content = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return content if digest == sha256(content).digest() else None


def _keep(kept: Path, content: bytes, max_files: int = _MAX_FILES) -> None:
    """Write a file and remove the oldest ones."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(kept, flush=False) as partial:
        partial.touch(0o600)
        partial.write_bytes(sha256(content).digest() + content)
    _remove_oldest(kept.parent, kept.suffix, max_files)


def _remove_oldest(folder: Path, suffix: str, max_files: int) -> None:
    newest_first = sorted(folder.glob(f"*{suffix}"), key=lambda path: -path.stat().st_mtime_ns)
    for old in newest_first[max_files:]:
        old.unlink()


def _key(source: Source, *parts: str) -> str:
    """The name of what this version of the builder makes of a part."""
    program = program_sha256(__name__)  # this module imports the builder, and all that it follows
    return sha256(b"\0".join([*(part.encode() for part in (program, *parts)), source.content])).hexdigest()
