"""Merged graphs, kept in the user's cache folder: merging takes longer than all else in loading a graph."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from edgekv.bundle import atomic_file
from edgekv.system import MIB, cache_folder, read_file, sha256_of

FOLDER = "merged"
_MOST_FILES = 64
_LARGEST_BYTES = 256 * MIB
_DIGEST_BYTES = sha256().digest_size
_PROGRAM = (Path(__file__).parent, Path(__file__).parent.parent / "rewrite.py")


def merged_bytes(graph: Path) -> bytes:
    """The merged graph of an ONNX file, serialized; see `merged`.

    It is made once for each content of the file and each version of the passes, and kept with its own hash. A cache
    folder that cannot be used is ignored.

    Raises:
        Exception: not an ONNX model; what `onnx` raises has no common base.
    """
    kept = cache_folder() / FOLDER / f"{_key(graph)}.onnx"
    content: bytes
    with suppress(OSError):
        content = read_file(kept, _LARGEST_BYTES)
        if content[:_DIGEST_BYTES] == sha256(content[_DIGEST_BYTES:]).digest():
            return content[_DIGEST_BYTES:]
    # Importing onnx_ir takes a second; kept graphs do not need it.
    from edgekv.runtime.merge.merge import merged

    content = merged(graph).SerializeToString()
    with suppress(OSError):
        _keep(kept, content)
    return content


def _keep(kept: Path, content: bytes) -> None:
    """Write a file and remove the oldest ones."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(kept) as partial:
        partial.touch(0o600)
        partial.write_bytes(sha256(content).digest() + content)
    newest_first = sorted(kept.parent.glob("*.onnx"), key=lambda path: -path.stat().st_mtime_ns)
    for old in newest_first[_MOST_FILES:]:
        old.unlink()


def _key(graph: Path) -> str:
    """Weights are not part of it: they stay in their files."""
    return sha256(_program() + bytes.fromhex(sha256_of(graph))).hexdigest()


@lru_cache(maxsize=1)
def _program() -> bytes:
    """A hash of the passes."""
    folder, helpers = _PROGRAM
    return sha256(b"".join(path.read_bytes() for path in (*sorted(folder.glob("*.py")), helpers))).digest()
