"""Rewritten graphs, kept in the user's cache folder: rewriting takes longer than all else in loading a graph."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import onnxruntime as ort

from edgekv.bundle import FileHashes, atomic_file, file_hashes
from edgekv.errors import EngineError
from edgekv.runtime.cpu_instructions import processor
from edgekv.runtime.cpu_mode import REWRITING_EXTRA, RenderedMode, can_rewrite
from edgekv.system import MIB, cache_folder, read_file, sha256_of

MERGED = "merged"
RENDERED = "rendered"
_MOST_FILES = 64
_MOST_RENDERED = 16
_COUNT_BYTES = 4
_ALIKE = ("alike rows",)
_LARGEST_BYTES = 256 * MIB
_DIGEST_BYTES = sha256().digest_size
_PROGRAM = (Path(__file__).parent, Path(__file__).parent.parent / "rewrite.py")
WEIGHT_SUFFIXES = (".safetensors", ".data", ".bin")


def merged_bytes(graph: Path, *, alike_rows: bool = False) -> bytes:
    """The merged graph of an ONNX file, serialized; see `merged`.

    It is made once for each content of the file and each version of the passes, and kept with its own hash. A cache
    folder that cannot be used is ignored. Without the packages that rewrite graphs it is the graph as it is, unless
    rows must be alike.

    Raises:
        Exception: not an ONNX model; what `onnx` raises has no common base.
    """
    # Weights are not part of the key: they stay in their files.
    kept = cache_folder() / MERGED / f"{_key(sha256_of(graph), *_ALIKE * alike_rows)}.onnx"
    with suppress(OSError):
        if (found := _read(kept)) is not None:
            return found
    if not alike_rows and not can_rewrite():
        return read_file(graph, _LARGEST_BYTES)
    # Importing onnx_ir takes a second; kept graphs do not need it.
    from edgekv.runtime.merge.merge import merged

    content: bytes = merged(graph, alike_rows=alike_rows).SerializeToString()
    with suppress(OSError):
        _keep(kept, content)
    return content


@contextmanager
def rendered_graph(graph: Path, mode: RenderedMode, *, alike_rows: bool = False) -> Iterator[tuple[bytes, Path]]:
    """The graph of an ONNX file, rewritten for a mode, serialized, and the folder of its weights; see `rendered`.

    It is made once for each content of the file and its weights, each mode, each version of the passes and of the
    runtime, and each kind of processor. Without a usable cache folder, the weights are removed when the block ends.

    Raises:
        EngineError: it is not kept, and the packages that rewrite graphs are not installed.
        Exception: not an ONNX model; what `onnx` raises has no common base.
    """
    folder = cache_folder() / RENDERED
    with file_hashes() as hashes:
        beside = sorted(path for path in graph.parent.iterdir() if path.suffix in WEIGHT_SUFFIXES)
        found = (mode, processor(), ort.__version__, *_ALIKE * alike_rows, *map(hashes.sha256_of, (graph, *beside)))
        kept = folder / f"{_key(*found)}.onnx"
        content = _read_rendered(kept, hashes)
    if content is None and not can_rewrite():
        raise EngineError(
            f"{graph.name} in the mode {mode}",
            got="no packages onnx and onnx_ir",
            expected="both: they rewrite graphs for this mode",
            fix=f'Run pip install "edgekv[{REWRITING_EXTRA}]", or use the mode emulate.',
        )
    if content is None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            content, weights = _render(graph, mode, folder, alike_rows)
            _keep(kept, _with_names(content, weights), _MOST_RENDERED)
            _remove_unused(folder)
    if content is not None:
        yield content, folder
        return
    with TemporaryDirectory(prefix="edgekv-", ignore_cleanup_errors=True) as scratch:
        yield _render(graph, mode, Path(scratch), alike_rows)[0], Path(scratch)


def _render(graph: Path, mode: RenderedMode, folder: Path, alike_rows: bool) -> tuple[bytes, tuple[str, ...]]:
    """The serialized model and the names of its weights, which are written to a folder."""
    from edgekv.runtime.merge.packed_weights import SCRATCH, pack_weights
    from edgekv.runtime.merge.render import rendered
    from edgekv.runtime.merge.weight_file import WeightFile

    with TemporaryDirectory(dir=folder, prefix=SCRATCH, ignore_cleanup_errors=True) as scratch:
        data = Path(scratch, "weights")
        with data.open("wb") as file:
            content: bytes = rendered(
                graph, mode, WeightFile(file, data.name), alike_rows=alike_rows
            ).SerializeToString()
        return pack_weights(content, Path(scratch), folder)


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
        if (found := _read(kept)) is not None:
            content, weights = _without_names(found)
            if all(hashes.sha256_of(kept.with_name(name)) == Path(name).stem for name in weights):
                os.utime(kept)  # the least recently used are removed
                return content
    return None


def _remove_unused(folder: Path) -> None:
    """Remove the weights of models that are gone."""
    from edgekv.runtime.merge.packed_weights import remove_unused_weights

    models = [_read(path) for path in folder.glob("*.onnx")]
    remove_unused_weights(folder, {name for each in models if each is not None for name in _without_names(each)[1]})


def _read(kept: Path) -> bytes | None:
    """The content of a kept file; None if it is damaged."""
    content = read_file(kept, _LARGEST_BYTES)
    digest, content = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return content if digest == sha256(content).digest() else None


def _keep(kept: Path, content: bytes, most: int = _MOST_FILES) -> None:
    """Write a file and remove the oldest ones."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(kept) as partial:
        partial.touch(0o600)
        partial.write_bytes(sha256(content).digest() + content)
    _remove_oldest(kept.parent, kept.suffix, most)


def _remove_oldest(folder: Path, suffix: str, most: int) -> None:
    newest_first = sorted(folder.glob(f"*{suffix}"), key=lambda path: -path.stat().st_mtime_ns)
    for old in newest_first[most:]:
        old.unlink()


def _key(*parts: str) -> str:
    """The name of what is made from these parts by this version of the passes."""
    return sha256(b"\0".join([_program(), *(part.encode() for part in parts)])).hexdigest()


@lru_cache(maxsize=1)
def _program() -> bytes:
    """A hash of the passes."""
    folder, helpers = _PROGRAM
    return sha256(b"".join(path.read_bytes() for path in (*sorted(folder.glob("*.py")), helpers))).digest()
