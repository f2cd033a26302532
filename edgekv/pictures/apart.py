"""Pictures decoded and cut in a child process: what Pillow's decoders do with foreign files ends that process alone.

`python -m edgekv.pictures.apart FOLDER` answers each line of JSON, `Job`, with a line `Answer` or `Refusal`. The files
are in FOLDER under their numbers, and there it writes the pixels of the tiles.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import msgspec
import numpy as np

from edgekv.errors import EngineError, UsageError
from edgekv.machine.child_dialog import ChildDialog
from edgekv.machine.scratch import scratch_folder
from edgekv.machine.system import MIB, read_file
from edgekv.pictures.tiled import WANTED, TiledPicture, TileGrid
from edgekv.spec import PictureSpec

MAX_FILE_BYTES = 32 * MIB
LIMIT_S = 30.0
"""Of a picture."""
LIMIT_BYTES = 1024 * MIB
"""Address space of the child; see `MAX_PIXELS` for what the largest pictures need. Only Linux limits it."""

_ENVIRONMENT: Mapping[str, str] = MappingProxyType({"OPENBLAS_NUM_THREADS": "1"})  # threads take address space


class Job(msgspec.Struct, frozen=True):
    """What to do with a picture.

    Attributes:
        number: of its file.
        pictures: how it is cut.
        edge: of a tile, in pixels.
        is_decoded: whether tiles are wanted; otherwise only its headers are read.
    """

    number: int
    pictures: PictureSpec
    edge: int
    is_decoded: bool


class Answer(msgspec.Struct, frozen=True, tag=True):
    """How the picture is cut."""

    grid: TileGrid


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The parts of a `UsageError`."""

    got: str
    expected: str
    fix: str


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
            files: the pictures.
            edge: of a tile, in pixels.
        """
        self._files = files
        self._edge = edge
        self._lock = threading.Lock()
        self._open = ExitStack()
        self._folder: Path | None = None
        self._child: ChildDialog | None = None
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
            UsageError: it is no picture of a known format, truncated, animated, or too large; or `stop` was called.
            EngineError: Pillow is not installed.
        """
        grid, edge = self._answer(number, is_decoded=True), self._edge
        assert self._folder is not None, "it has answered"
        file = self._folder / f"{number}.tiles"
        tiles = np.frombuffer(file.read_bytes(), np.uint8).reshape(grid.tiles, edge, edge, 3)
        file.unlink()
        return TiledPicture(tuple(tiles), grid)

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
        line = (
            child.read() if child.send(msgspec.json.encode(Job(number, file.pictures, self._edge, is_decoded))) else b""
        )
        if not line:
            ending = f"no answer within {child.timeout_s:g} s" if child.timed_out else child.exit_text()
            raise _undecoded(file.field, ending)
        answer = msgspec.json.decode(line, type=Answer | Refusal)
        if isinstance(answer, Refusal):
            raise UsageError(file.field, got=answer.got, expected=answer.expected, fix=answer.fix)
        return answer.grid

    def _started(self, field: str) -> tuple[ChildDialog, Path]:
        if find_spec("PIL") is None:
            fix = 'pip install "edgekv[pictures]"'
            raise EngineError(field, got="no Pillow", expected="the package that reads pictures", fix=fix)
        with self._lock:
            if self._is_stopped:
                raise _undecoded(field, "a stop")
            if self._child is None or self._folder is None:
                self._folder = self._open.enter_context(scratch_folder("pictures"))
                child = ChildDialog(
                    "edgekv.pictures.apart", str(self._folder), environment=_ENVIRONMENT, timeout_s=LIMIT_S
                )
                self._child = self._open.enter_context(child)
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
    found, wanted = f"a picture whose decoding ended with {ending}", "one that is decoded"
    return UsageError(field, got=found, expected=wanted, fix="Save it again as PNG or JPEG, or resize it.")


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
    """The child process: answer until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent
    with suppress(ImportError):
        _limit_memory()
    folder = Path(sys.argv[1])
    while line := sys.stdin.buffer.readline():
        job = msgspec.json.decode(line, type=Job)
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_REAL, LIMIT_S + 1)  # the parent may be gone
        sys.stdout.buffer.write(msgspec.json.encode(_done(job, folder)) + b"\n")
        sys.stdout.buffer.flush()
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_REAL, 0)


def _done(job: Job, folder: Path) -> Answer | Refusal:
    from edgekv.pictures.decode import picture_size, read_picture
    from edgekv.pictures.tiles import cut_tiles, tile_grid

    content = (folder / str(job.number)).read_bytes()
    try:
        if not job.is_decoded:
            return Answer(tile_grid(picture_size(content, ""), job.pictures, job.edge))
        picture = cut_tiles(read_picture(content, ""), job.pictures, job.edge)
        (folder / f"{job.number}.tiles").write_bytes(np.stack(picture.tiles).tobytes())
    except UsageError as error:
        return Refusal(str(error.got), str(error.expected), error.fix)
    except MemoryError:
        wanted, fix = f"one that is decoded in {LIMIT_BYTES // MIB:,} MiB", "Resize it, or save it in 8 bits."
        return Refusal("a picture that takes more memory", wanted, fix)
    return Answer(picture.grid)


def _limit_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # macOS, or a lower limit is set
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))


if __name__ == "__main__":
    _main()
