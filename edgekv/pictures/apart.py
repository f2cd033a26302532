"""Pictures decoded and cut in a child process: what Pillow's decoders do with foreign files ends that process alone.

`python -m edgekv.pictures.apart REPLY` reads a line of JSON, `Job`, and the file's content from standard input, and
writes a line of JSON, `Answer` or `Refusal`, and the pixels of the tiles to REPLY.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np

from edgekv.child import run_in_child
from edgekv.errors import EngineError, UsageError
from edgekv.pictures.tiled import WANTED, TiledPicture, TileGrid
from edgekv.spec import PictureSpec
from edgekv.system import MIB, read_file

MAX_FILE_BYTES = 32 * MIB
LIMIT_S = 30.0
LIMIT_BYTES = 1024 * MIB
"""Address space of the child; see `MAX_PIXELS` for what the largest pictures need. Only Linux limits it."""

_ENVIRONMENT: Mapping[str, str] = MappingProxyType({"OPENBLAS_NUM_THREADS": "1"})  # threads take address space


class Job(msgspec.Struct, frozen=True):
    """What to do with a picture: how it is cut, and the edge of a tile."""

    pictures: PictureSpec
    edge: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The number of tiles, and where they stand."""

    tiles: int
    grid: TileGrid


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The parts of a `UsageError`."""

    got: str
    expected: str
    fix: str


def open_tiles(source: Path | bytes, field: str, pictures: PictureSpec, edge: int) -> TiledPicture:
    """The tiles of a picture; see `read_picture` and `cut_tiles`.

    Args:
        source: a file, or its content.
        field: for errors.
        pictures: says whether it is split, and how large it may be.
        edge: of a tile, in pixels.

    Raises:
        UsageError: the file cannot be read, is no picture of a known format, truncated, animated, or too large.
        EngineError: Pillow is not installed.
    """
    if find_spec("PIL") is None:
        fix = 'pip install "edgekv[pictures]"'
        raise EngineError(field, got="no Pillow", expected="the package that reads pictures", fix=fix)
    job = msgspec.json.encode(Job(pictures, edge)) + b"\n" + picture_content(source, field)
    ended = run_in_child("edgekv.pictures.apart", job, timeout_s=LIMIT_S, environment=_ENVIRONMENT)
    if ended.reply is None:
        found, wanted = f"a picture whose decoding ended with {ended.ending}", "one that is decoded"
        raise UsageError(field, got=found, expected=wanted, fix="Save it again as PNG or JPEG, or resize it.")
    head, _, pixels = ended.reply.partition(b"\n")
    answer = msgspec.json.decode(head, type=Answer | Refusal)
    if isinstance(answer, Refusal):
        raise UsageError(field, got=answer.got, expected=answer.expected, fix=answer.fix)
    tiles = np.frombuffer(pixels, np.uint8).reshape(answer.tiles, edge, edge, 3)
    return TiledPicture(tuple(tiles), answer.grid)


def picture_content(source: Path | bytes, field: str) -> bytes:
    """The content of a file that may be a picture.

    Raises:
        UsageError: the file cannot be read, or is too large.
    """
    if isinstance(source, Path):
        try:
            return read_file(source, MAX_FILE_BYTES)
        except OSError as error:
            found = f"{source}: {error.strerror or error}"
            raise UsageError(field, got=found, expected=WANTED, fix="Check the path.") from None
    if len(source) > MAX_FILE_BYTES:
        found, wanted = f"{len(source):,} bytes", f"at most {MAX_FILE_BYTES // MIB} MiB"
        raise UsageError(field, got=found, expected=wanted, fix="Use a smaller picture.")
    return source


def _main() -> None:
    """The child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent
    with suppress(ImportError):
        _limit_memory()
    from edgekv.pictures.decode import read_picture
    from edgekv.pictures.tiles import cut_tiles

    head, content = sys.stdin.buffer.readline(), sys.stdin.buffer.read()
    job, pixels = msgspec.json.decode(head, type=Job), b""
    answer: Answer | Refusal
    try:
        picture = cut_tiles(read_picture(content, ""), job.pictures, job.edge)
        answer = Answer(len(picture.tiles), picture.grid)
        pixels = np.stack(picture.tiles).tobytes()
    except UsageError as error:
        answer = Refusal(str(error.got), str(error.expected), error.fix)
    except MemoryError:
        wanted, fix = f"one that is decoded in {LIMIT_BYTES // MIB:,} MiB", "Resize it, or save it in 8 bits."
        answer = Refusal("a picture that takes more memory", wanted, fix)
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(answer) + b"\n" + pixels)


def _limit_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # macOS, or a lower limit is set
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))


if __name__ == "__main__":
    _main()
