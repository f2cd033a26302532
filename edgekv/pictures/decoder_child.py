"""Pictures decoded and cut in a child process: what Pillow's decoders do with foreign files ends that process alone."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from edgekv.errors import EngineError, UsageError
from edgekv.machine.child import Child, ChildEndedError, Limits
from edgekv.machine.scratch import scratch_folder
from edgekv.machine.system import MIB, read_file
from edgekv.pictures.tiled import EXPECTED, TiledPicture, TileGrid
from edgekv.spec import PictureSpec

MAX_FILE_BYTES = 32 * MIB
LIMIT_S = 30.0
"""Of a picture."""
LIMIT_BYTES = 1024 * MIB
"""Address space of the child; see `MAX_DECODED_BYTES` for what the largest pictures need. Only Linux limits it."""

_LIMITS = Limits(LIMIT_S, LIMIT_BYTES, {"OPENBLAS_NUM_THREADS": "1"})  # threads take address space


class DecodeJob(msgspec.Struct, frozen=True):
    """What to do with a picture.

    Attributes:
        file: with it. The pixels of its tiles are written beside it, as `FILE.tiles`.
        pictures: how it is cut.
        edge: of a tile, in pixels.
        is_decoded: whether tiles are wanted; otherwise only its headers are read.
    """

    file: str
    pictures: PictureSpec
    edge: int
    is_decoded: bool


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A file that may be a picture.

    Attributes:
        content: of it.
        field: for errors.
        pictures: whether it is split, and how large it may be.
    """

    content: bytes
    field: str
    pictures: PictureSpec


class PictureReader:
    """Reads pictures in a child process, which is started for the first of them. A context manager."""

    def __init__(self, files: Sequence[PictureFile], edge: int) -> None:
        """Read nothing yet.

        Args:
            edge: of a tile, in pixels.
        """
        self._files = files
        self._edge = edge
        self._lock = threading.Lock()
        self._open = ExitStack()
        self._folder: Path | None = None
        self._child: Child | None = None
        self._is_stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def grid(self, number: int) -> TileGrid:
        """How a picture is cut, by its headers; see `picture_size` for what they may not say.

        Raises:
            UsageError: as `open`, as far as the headers say.
            EngineError: Pillow is not installed.
        """
        return self._answer(number, is_decoded=False)

    def open(self, number: int) -> TiledPicture:
        """The tiles of a picture; see `read_picture` and `cut_tiles`.

        Raises:
            UsageError: it is no picture of a known format, truncated, or too large; or `stop` was called.
            EngineError: Pillow is not installed.
        """
        grid = self._answer(number, is_decoded=True)
        assert self._folder is not None, "it has answered"
        file = self._folder / f"{number}.tiles"
        shapes = [(height, width, 3) for width, height in grid.tile_sizes(self._edge)]
        ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        tiles = np.split(np.frombuffer(file.read_bytes(), np.uint8), ends)
        file.unlink()
        return TiledPicture(tuple(tile.reshape(shape) for tile, shape in zip(tiles, shapes, strict=True)), grid)

    def stop(self) -> None:
        """Stop reading, from any thread; a read in progress fails at once."""
        with self._lock:
            self._is_stopped = True
            if self._child is not None:
                self._child.kill()

    def _answer(self, number: int, *, is_decoded: bool) -> TileGrid:
        file = self._files[number]
        child, folder = self._started(file.field)
        if not (path := folder / str(number)).exists():
            path.write_bytes(file.content)
        try:
            return child.call(run_job, DecodeJob(str(path), file.pictures, self._edge, is_decoded))
        except ChildEndedError as error:
            raise _undecoded(file.field, error.ending if error.timed_out else error.ending.partition(":")[0]) from None
        except UsageError as error:
            raise UsageError(file.field, got=error.got, expected=error.expected, fix=error.fix) from None

    def _started(self, field: str) -> tuple[Child, Path]:
        if find_spec("PIL") is None:
            fix = 'pip install "edgekv[pictures]"'
            raise EngineError(field, got="no Pillow", expected="the package that reads pictures", fix=fix)
        with self._lock:
            if self._is_stopped:
                raise _undecoded(field, "a stop")
            if self._child is None or self._folder is None:
                self._folder = self._open.enter_context(scratch_folder("pictures"))
                self._child = self._open.enter_context(Child(_LIMITS))
            return self._child, self._folder


def open_tiles(source: Path | bytes, field: str, pictures: PictureSpec, edge: int) -> TiledPicture:
    """The tiles of a picture; see `PictureReader.open`.

    Args:
        source: a file, or its content.
        field: for errors.
        pictures: says whether it is split, and how large it may be.
        edge: of a tile, in pixels.

    Raises:
        UsageError: the file cannot be read, or is refused.
        EngineError: Pillow is not installed.
    """
    with PictureReader([PictureFile(picture_content(source, field), field, pictures)], edge) as reader:
        return reader.open(0)


def _undecoded(field: str, ending: str) -> UsageError:
    got, expected = f"a picture whose decoding ended with {ending}", "one that is decoded"
    return UsageError(field, got=got, expected=expected, fix="Save it again as PNG or JPEG, or resize it.")


def picture_content(source: Path | bytes, field: str) -> bytes:
    """The content of a file that may be a picture.

    Raises:
        UsageError: the file cannot be read, or is too large.
    """
    if isinstance(source, Path):
        try:
            return read_file(source, MAX_FILE_BYTES)
        except OSError as error:
            got = f"{source}: {error.strerror or error}"
            raise UsageError(field, got=got, expected=EXPECTED, fix="Check the path.") from None
    if len(source) > MAX_FILE_BYTES:
        got, expected = f"{len(source):,} bytes", f"at most {MAX_FILE_BYTES // MIB} MiB"
        raise UsageError(field, got=got, expected=expected, fix="Use a smaller picture.")
    return source


def run_job(job: DecodeJob) -> TileGrid:
    """Read a picture in this process.

    Raises:
        UsageError: it is refused.
    """
    from edgekv.pictures.decode import picture_size, read_picture
    from edgekv.pictures.tiles import cut_tiles, tile_grid

    content = Path(job.file).read_bytes()
    try:
        if not job.is_decoded:
            return tile_grid(picture_size(content, ""), job.pictures, job.edge)
        pixels, size = read_picture(content, "")
        picture = cut_tiles(pixels, job.pictures, job.edge, size)
        Path(f"{job.file}.tiles").write_bytes(b"".join(tile.tobytes() for tile in picture.tiles))
    except MemoryError:
        expected, fix = f"one that is decoded in {LIMIT_BYTES // MIB:,} MiB", "Resize it, or save it in 8 bits."
        raise UsageError("", got="a picture that takes more memory", expected=expected, fix=fix) from None
    return picture.grid
