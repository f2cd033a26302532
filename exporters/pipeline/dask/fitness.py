"""Whether a worker can do pieces: the same programs, the same checkpoint, and disk space."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from distributed import Status, Worker, WorkerPlugin

from edgekv.errors import EdgeKVError
from edgekv.machine.program import program_sha256
from edgekv.machine.system import format_bytes
from exporters.pipeline.place import Identity, Place
from exporters.pipeline.store import PieceStore

PACKAGES = ("edgekv", "onnxruntime", "onnxruntime-qnn", "numpy")
"""Packages whose version the bytes of a bundle depend on."""

_MAKERS = (
    __name__,
    "exporters.pipeline.drafter",
    "exporters.pipeline.planning",
    "exporters.pipeline.sensitivity",
    "exporters.sweep.quality",
    "exporters.targets.aihub.run",
    "exporters.targets.aihub.sample",
)
"""Modules of this worker, and of pieces: each module of pieces is among what these import."""
TOPIC = "edgekv-pieces"
RAM = "RAM"
_SHARE = 1_000_000  # of the mark of a fit worker; each piece takes one


def versions() -> dict[str, str]:
    """The versions of `PACKAGES` in this process, and a hash of edgekv's program."""
    installed = {package: _version(package) for package in PACKAGES}
    return installed | {"edgekv's program": program_sha256(*_MAKERS)[:12]}


@dataclass(frozen=True, slots=True)
class WorkerRequirements:
    """What a worker needs.

    Attributes:
        versions: those of the command.
        place: of the checkpoint; None if no piece reads one.
        identity: of what lies there.
        store: of the pieces.
        probe: name of a piece that is there.
        disk_bytes: free space wanted where the worker keeps pieces.
    """

    versions: dict[str, str]
    place: Place | None
    identity: Identity | None
    store: PieceStore
    probe: str
    disk_bytes: int

    def problems(self) -> list[str]:
        """Why this process cannot do the pieces; empty if it can."""
        return [*self._problems()]

    async def look(self) -> list[str]:
        """As `problems`, in a thread: a scheduler drops workers that send no heartbeats while they fetch and hash."""
        return await asyncio.to_thread(self.problems)

    def _problems(self) -> Iterator[str]:
        for package, installed in versions().items():
            if installed != self.versions[package]:
                yield f"{package} {installed}; expected {self.versions[package]}"
        try:
            if self.place is not None and self.identity is not None:
                self.place.proven(**{name: getattr(self.identity, name) for name in Identity.__slots__})
        except EdgeKVError as error:
            yield str(error)
        if self.store.find(self.probe) is None:
            yield f"pieces not seen in {self.store.place}"
            return
        folder = self.store.folder
        folder.mkdir(parents=True, exist_ok=True)
        if (free_bytes := shutil.disk_usage(folder).free) < self.disk_bytes:
            yield f"{format_bytes(free_bytes)} free in {folder}; expected {format_bytes(self.disk_bytes)}"


class FitWorkers(WorkerPlugin):  # type: ignore[misc]
    """Marks workers that fit, those that join late too; pieces go to marked workers only."""

    def __init__(self, requirements: WorkerRequirements, mark: str, ram_bytes: int) -> None:
        self.name = mark
        self._requirements = requirements
        self._ram_bytes = ram_bytes
        self._task: asyncio.Task[None] | None = None  # a loop keeps no task alive

    async def setup(self, worker: Worker) -> None:
        """Start to look at the worker that this runs in; it sends heartbeats once this has returned."""
        await worker.set_resources(**{looking(self.name): 1})
        self._task = asyncio.create_task(self._look(worker))

    async def _look(self, worker: Worker) -> None:
        try:
            problems = await self._requirements.look()
        except Exception as error:  # of file systems
            problems = [f"{type(error).__name__}: {error}"]
        resources = {looking(self.name): 0}
        if problems:
            worker.log_event(TOPIC, {"worker": worker.address, "problems": problems})
        else:
            resources[self.name] = _SHARE
            if RAM not in worker.state.total_resources:
                resources[RAM] = worker.memory_manager.memory_limit or self._ram_bytes
        await worker.set_resources(**resources)
        # A scheduler gives waiting pieces to workers that join or go on, not to those that have become able to do them.
        worker.status = Status.paused
        worker.status = Status.running


def looking(mark: str) -> str:
    """The mark of a worker that is being looked at."""
    return f"{mark}-looking"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
