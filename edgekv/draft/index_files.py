"""Indexes of corpora, kept in the user's cache folder and mapped."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from mmap import ACCESS_READ, mmap
from pathlib import Path

from edgekv.draft.corpus_index import BYTES_PER_TOKEN, CorpusIndex
from edgekv.machine.scratch import atomic_file
from edgekv.machine.system import cache_folder, open_regular

CORPORA = "corpora"
_SUFFIX = ".corpus"
_FORMAT = b"edgekv corpus 1\n"
_MOST_FILES = 16
_DIGEST_BYTES = sha256().digest_size


def kept_index(key: Sequence[bytes], make: Callable[[], bytes]) -> CorpusIndex:
    """An index that is made once and mapped from its file.

    A file ends with a hash of its content, and is named after what it is made from. A cache folder that cannot be used
    is ignored. The 16 files used last stay.

    Args:
        key: what the index depends on.
        make: see `build_index`.
    """
    digest = sha256(_FORMAT)
    for each in key:
        digest.update(sha256(each).digest())
    kept = cache_folder() / CORPORA / f"{digest.hexdigest()}{_SUFFIX}"
    with suppress(OSError, ValueError):
        return _map(kept)
    content = make()
    with suppress(OSError, ValueError):
        _keep(kept, content)
        return _map(kept)
    return CorpusIndex(content, len(content) // BYTES_PER_TOKEN)


def _keep(kept: Path, content: bytes) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(kept, flush=False) as partial:
        partial.touch(0o600)
        with partial.open("wb") as file:
            file.write(content)
            file.write(sha256(content).digest())
    newest_first = sorted(kept.parent.glob(f"*{_SUFFIX}"), key=lambda path: -path.stat().st_mtime_ns)
    for old in newest_first[_MOST_FILES:]:
        old.unlink(missing_ok=True)


def _map(kept: Path) -> CorpusIndex:
    """The index in a file.

    Raises:
        OSError: there is no such file.
        ValueError: it is damaged.
    """
    with open_regular(kept) as file:
        mapped = mmap(file.fileno(), 0, access=ACCESS_READ)
    size = len(mapped) - _DIGEST_BYTES
    with memoryview(mapped) as whole:
        if size < BYTES_PER_TOKEN or sha256(whole[:size]).digest() != whole[size:]:
            raise ValueError(f"{kept}: damaged")
    os.utime(kept)
    return CorpusIndex(mapped, size // BYTES_PER_TOKEN)
