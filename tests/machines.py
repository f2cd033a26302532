"""Simulated machines: a Dask scheduler and workers, each a process group with a cache folder of its own."""

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

WAIT_S = 60.0
_OPTIONS = ["--nworkers", "1", "--no-dashboard", "--no-nanny"]


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
