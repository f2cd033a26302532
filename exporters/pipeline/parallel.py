"""Several child processes at a time, such as compilers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import onnx

from edgekv.errors import EngineError
from edgekv.machine.graph_file import graph_content
from edgekv.machine.system import free_memory_bytes
from edgekv.plan import compile_bytes
from exporters.progress import Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """Work that waits for a child process.

    Attributes:
        call: does it.
        ram_bytes: estimated RAM of the child process.
    """

    call: Callable[[], T]
    ram_bytes: int


def side_by_side(jobs: Sequence[Job[T]], stage: str, progress: Progress) -> Iterator[T]:
    """Run jobs concurrently and yield their results in order: one per core, as many as fit in free RAM together.

    A job that needs more than that runs alone.

    Args:
        jobs: what to run.
        stage: name of the stage for `progress`.
        progress: called after each job.

    Raises:
        Exception: raised by a job; those that have not started are cancelled.
    """
    ram = _Ram()

    def run(job: Job[T]) -> T:
        with ram.taken(job.ram_bytes):
            return job.call()

    progress(stage, 0, len(jobs))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        running = [pool.submit(run, job) for job in jobs]
        try:
            for done, future in enumerate(running, start=1):
                yield future.result()
                progress(stage, done, len(jobs))
        finally:
            for future in running:
                future.cancel()


def compiler_bytes(models: Sequence[Path]) -> int:
    """Estimated RAM to compile ONNX files, which share their weights, into one binary."""
    weights_bytes = packed_bytes = graph_bytes = 0
    for path in models:
        content = graph_content(path)
        graph_bytes = max(graph_bytes, len(content))
        sizes, packed = dict[tuple[str, str], int](), dict[tuple[str, str], int]()
        for tensor in onnx.load_from_string(content).graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if place:
                at, length = (place["location"], place.get("offset", "0")), int(place["length"])
                sizes[at] = length
                if tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4):
                    packed[at] = length
        weights_bytes = max(weights_bytes, sum(sizes.values()))
        packed_bytes = max(packed_bytes, sum(packed.values()))
    return compile_bytes(weights_bytes, graph_bytes, len(models), packed_bytes=packed_bytes)


class _Ram:
    """The RAM that is free at first, shared by jobs."""

    def __init__(self) -> None:
        try:
            self._free_bytes = free_memory_bytes()
        except EngineError:  # the system does not report it: one job at a time
            self._free_bytes = 0
        self._taken_bytes = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, ram_bytes: int) -> Iterator[None]:
        """Wait until this much is left, or until no job runs."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken_bytes or self._taken_bytes + ram_bytes <= self._free_bytes)
            self._taken_bytes += ram_bytes
        try:
            yield
        finally:
            with self._changed:
                self._taken_bytes -= ram_bytes
                self._changed.notify_all()
