"""Rewritten graphs, kept in the user's cache folder: rewriting takes longer than all else in loading a graph."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from edgekv.bundle import FileHashes, atomic_file, file_hashes
from edgekv.runtime.cpu_instructions import multiplies_integers
from edgekv.runtime.cpu_mode import RenderedMode
from edgekv.system import MIB, cache_folder, read_file, sha256_of

MERGED = "merged"
RENDERED = "rendered"
_WEIGHTS = ".weights"
_MOST_FILES = 64
_MOST_WEIGHT_FILES = 16
_LARGEST_BYTES = 256 * MIB
_DIGEST_BYTES = sha256().digest_size
_PROGRAM = (Path(__file__).parent, Path(__file__).parent.parent / "rewrite.py")
WEIGHT_SUFFIXES = (".safetensors", ".data", ".bin")


def merged_bytes(graph: Path) -> bytes:
    """The merged graph of an ONNX file, serialized; see `merged`.

    It is made once for each content of the file and each version of the passes, and kept with its own hash. A cache
    folder that cannot be used is ignored.

    Raises:
        Exception: not an ONNX model; what `onnx` raises has no common base.
    """
    # Weights are not part of the key: they stay in their files.
    kept = cache_folder() / MERGED / f"{_key(sha256_of(graph))}.onnx"
    with suppress(OSError):
        if (found := _read(kept)) is not None:
            return found
    # Importing onnx_ir takes a second; kept graphs do not need it.
    from edgekv.runtime.merge.merge import merged

    content: bytes = merged(graph).SerializeToString()
    with suppress(OSError):
        _keep(kept, content)
    return content


@contextmanager
def rendered_graph(graph: Path, mode: RenderedMode) -> Iterator[tuple[bytes, Path]]:
    """The graph of an ONNX file, rewritten for a mode, serialized, and the folder of its weights; see `rendered`.

    It is made once for each content of the file and its weights, each mode and each version of the passes. Without a
    usable cache folder, the weights are removed when the block ends.

    Raises:
        Exception: not an ONNX model; what `onnx` raises has no common base.
    """
    folder = cache_folder() / RENDERED
    with file_hashes() as hashes:
        beside = sorted(path for path in graph.parent.iterdir() if path.suffix in WEIGHT_SUFFIXES)
        kept = folder / f"{_key(mode, str(multiplies_integers()), *map(hashes.sha256_of, (graph, *beside)))}.onnx"
        content = _read_rendered(kept, hashes)
    if content is None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            content, digest = _render(graph, mode, kept)
            _keep(kept, content, before=digest)
            _remove_oldest(folder, _WEIGHTS, _MOST_WEIGHT_FILES)
    if content is not None:
        yield content, folder
        return
    with TemporaryDirectory(prefix="edgekv-", ignore_cleanup_errors=True) as scratch:
        yield _render(graph, mode, Path(scratch, kept.name))[0], Path(scratch)


def _render(graph: Path, mode: RenderedMode, kept: Path) -> tuple[bytes, bytes]:
    """The serialized model and the SHA-256 of its weights, which are written beside `kept`."""
    from edgekv.runtime.merge.render import rendered
    from edgekv.runtime.merge.weight_file import WeightFile

    target = kept.with_suffix(_WEIGHTS)
    with atomic_file(target) as partial:
        partial.touch(0o600)
        with partial.open("wb") as file:
            weights = WeightFile(file, target.name)
            content: bytes = rendered(graph, mode, weights).SerializeToString()
    return content, weights.digest()


def _read_rendered(kept: Path, hashes: FileHashes) -> bytes | None:
    """A kept model; None if it or its weights are missing or damaged."""
    with suppress(OSError):
        content = _read(kept)
        weights = kept.with_suffix(_WEIGHTS)
        if content is not None and hashes.sha256_of(weights) == content[:_DIGEST_BYTES].hex():
            for path in (kept, weights):
                os.utime(path)  # the least recently used are removed
            return content[_DIGEST_BYTES:]
    return None


def _read(kept: Path) -> bytes | None:
    """The content of a kept file; None if it is damaged."""
    content = read_file(kept, _LARGEST_BYTES)
    digest, content = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return content if digest == sha256(content).digest() else None


def _keep(kept: Path, content: bytes, before: bytes = b"") -> None:
    """Write a file and remove the oldest ones."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    content = before + content
    with atomic_file(kept) as partial:
        partial.touch(0o600)
        partial.write_bytes(sha256(content).digest() + content)
    _remove_oldest(kept.parent, kept.suffix, _MOST_FILES)


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
