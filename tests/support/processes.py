"""Processes that a test interrupts or kills, and what they leave.

Simulated machines are a Dask scheduler and workers, each a process group with its own cache; and there is odd work.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from edgekv.errors import UsageError
from edgekv.machine.scratch import scratch_folder
from exporters.pipeline.dask.fitness import WorkerRequirements
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.piece import Piece

WAIT_S = 60.0
_OPTIONS = ["--nworkers", "1", "--no-dashboard", "--no-nanny"]


def interruptible() -> None:
    """For `preexec_fn`: a shell starts background jobs with SIGINT ignored, nohup with SIGHUP, and so these tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def left_by_a_killed_process(parent: Path, prefix: str) -> Path:
    """A folder of `held_folder` whose process was killed."""
    held = "import sys, time; from pathlib import Path; from edgekv.machine.scratch import held_folder\n"
    held += "with held_folder(Path(sys.argv[1]), sys.argv[2]) as folder: print(folder, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", held, str(parent), prefix], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        folder = Path(child.stdout.readline().decode().strip())
        child.kill()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder by their relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@dataclass(slots=True)
class Machines:
    """A scheduler and its workers.

    Attributes:
        folder: of the scheduler's file and of a folder for each worker.
        running: the processes by name.
    """

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Of the scheduler, once it is there."""
        file, end = self.folder / "scheduler.json", time.monotonic() + WAIT_S
        while time.monotonic() < end:
            try:
                found: str = json.loads(file.read_text())["address"]
                return found
            except (OSError, ValueError):
                time.sleep(0.05)
        raise AssertionError("the scheduler did not start")

    def start_scheduler(self) -> None:
        """Start it at a free port."""
        options = ["--port", "0", "--host", "127.0.0.1", "--no-dashboard"]
        options += ["--scheduler-file", str(self.folder / "scheduler.json")]
        self._start("scheduler", ["dask_scheduler", *options], {})

    def start_worker(
        self, name: str, environment: Mapping[str, str] = {}, *, ram_bytes: int = 4 * 10**9, threads: int = 1
    ) -> None:
        """Start a worker; it joins in the background."""
        options = [*_OPTIONS, "--name", name, "--nthreads", str(threads), "--resources", f"RAM={ram_bytes}"]
        place = ["--local-directory", str(self.folder / name / "dask")]
        cache = {"EDGEKV_CACHE_DIR": str(self.folder / name / "cache"), **environment}
        self._start(name, ["dask_worker", self.address, *options, *place], cache)

    def kill(self, name: str) -> None:
        """SIGKILL a worker or the scheduler."""
        self.signal(name, signal.SIGKILL)
        self.running.pop(name).wait(WAIT_S)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to all processes of a worker or the scheduler."""
        os.killpg(self.running[name].pid, number)

    def _start(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        self.running[name] = subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.{command[0]}", *command[1:]],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment},
            start_new_session=True,
        )


@contextmanager
def machines(folder: Path) -> Iterator[Machines]:
    """A scheduler; all that was started is killed at the end."""
    made = Machines(folder)
    try:
        made.start_scheduler()
        yield made
    finally:
        for name in [*made.running]:
            made.kill(name)


@dataclass(frozen=True, slots=True)
class Odd(Piece):
    """Work that needs no other."""

    kind: ClassVar[str] = "test"

    @property
    def needs(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Sleep(Odd):
    """Work that writes the id of its process to the store, then sleeps."""

    seconds: float

    def make(self, folder: Path, inputs: Inputs) -> None:
        (inputs.store.folder / f"pid-{os.getpid()}").touch()
        time.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class Die(Odd):
    """Work that its process does not survive."""

    def make(self, folder: Path, inputs: Inputs) -> None:
        os._exit(9)


@dataclass(frozen=True, slots=True)
class Hold(Odd):
    """Work that holds memory for a while; answers how much all such pieces of its process held at most meanwhile.

    Attributes:
        held_bytes: that it holds.
        number: of the piece.
    """

    held_bytes: int
    number: int

    def make(self, folder: Path, inputs: Inputs) -> int:
        mark, max_bytes = inputs.store.folder / f"holds-{os.getpid()}-{self.number}", 0
        memory = bytearray(self.held_bytes)
        mark.write_text(str(len(memory)))
        try:
            end = time.monotonic() + 1
            while time.monotonic() < end:
                marks = inputs.store.folder.glob(f"holds-{os.getpid()}-*")
                max_bytes = max(max_bytes, sum(int(_text(each) or 0) for each in marks))
                time.sleep(0.02)
        finally:
            mark.unlink()
        return max_bytes


@dataclass(frozen=True, slots=True)
class Waiting(WorkerRequirements):
    """A worker that looks at itself until somebody has asked it to write `answered` into the store."""

    def problems(self) -> list[str]:
        (self.store.folder / "looking").touch()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if (self.store.folder / "answered").exists():
                return []
            time.sleep(0.02)
        return ["nobody could ask it"]


def look(names: list[str]) -> list[str]:
    """Variables, the current folder, and the temporary directory."""
    with scratch_folder("look") as folder:
        return [*(os.environ[name] for name in names), str(Path.cwd()), str(folder.parent)]


def end(kind: str) -> int:
    print("the last line", flush=True)
    if kind == "hang":
        time.sleep(600)
    if kind == "grow":
        bytearray(1 << 31)
    if kind == "refuse":
        raise UsageError("a field", got=1, expected="another", fix="Mend it.")
    os.abort()


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:  # its piece has ended
        return ""
