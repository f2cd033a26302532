"""A Dask cluster: processes on this machine, or any scheduler."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from distributed import Client, LocalCluster

import dask
from edgekv.errors import EngineError, ServiceError, UsageError
from edgekv.machine.scratch import scratch_folder
from edgekv.machine.system import free_memory_bytes
from exporters.options import LOCAL
from exporters.pipeline.dask.fitness import RAM
from exporters.pipeline.dask.limit import within

_CONNECT_S = 10.0
_START_S = 180.0  # of processes that import edgekv on a busy machine
_CLOSE_S = 30.0
_WORKER = "Dask Worker process"  # name of the processes of a `LocalCluster`
_START_ONE = "Start one with `dask scheduler`, or use --scheduler local."
_AGAIN = "Run the same command again: finished pieces are not done again."
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), 1)
"""Of local workers. Dask's own also sets MALLOC_TRIM_THRESHOLD_: glibc then maps every array anew, and quantizing takes
1.7 times the processor time."""
_UNKNOWN_BYTES = 8_000_000_000  # where the system does not report free RAM


@contextmanager
def connected(scheduler: str, workers: int | None, largest_bytes: int) -> Iterator[Client]:
    """A client of a scheduler.

    Args:
        scheduler: `local` for processes on this machine, or an address such as `tcp://HOST:8786`.
        workers: number of local processes; None for one per core, as far as RAM allows.
        largest_bytes: RAM of the largest piece.

    Raises:
        ServiceError: the scheduler cannot be reached.
        UsageError: the address is none, or this machine has too little RAM.
    """
    if scheduler == LOCAL:
        with _local(workers, largest_bytes) as client:
            yield client
        return
    if workers is not None:
        raise UsageError("--workers", got=f"{workers} with --scheduler", expected="one of both", fix="Leave it out.")
    try:
        client = within(
            2 * _CONNECT_S,
            f"--scheduler {scheduler}",
            lambda: Client(scheduler, timeout=_CONNECT_S, set_as_default=False),
            fix=_START_ONE,
        )
    except (OSError, ValueError, TypeError) as error:
        raise ServiceError(
            f"--scheduler {scheduler}",
            got=str(error) or type(error).__name__,
            expected="a Dask scheduler that answers, such as tcp://HOST:8786",
            fix=_START_ONE,
        ) from None
    try:
        yield client
    finally:
        _close(client.close)


@contextmanager
def _local(workers: int | None, largest_bytes: int) -> Iterator[Client]:
    try:
        free_bytes = free_memory_bytes()
    except EngineError:
        free_bytes = max(_UNKNOWN_BYTES, largest_bytes)
    if free_bytes < largest_bytes:
        raise UsageError(
            "RAM",
            got=f"{free_bytes / 1e9:.2f} GB free",
            expected=f"{largest_bytes / 1e9:.2f} GB for the largest piece",
            fix="Free some, use --splits, fewer --calibration-tokens, or --scheduler with larger machines.",
        )
    fitting = max(1, free_bytes // max(1, largest_bytes))
    count = workers or min(len(_cores()), fitting)
    ram_bytes = max(free_bytes // count, largest_bytes)
    with scratch_folder("cluster") as folder, _processes(str(folder), count, ram_bytes) as cluster:
        client = within(_START_S, "scheduler", lambda: Client(cluster, set_as_default=False), fix=_AGAIN)
        try:
            yield client
        finally:
            _close(client.close)


@contextmanager
def _processes(folder: str, count: int, ram_bytes: int) -> Iterator[LocalCluster]:
    """Worker processes on this machine; at the end none is left, whatever they are doing.

    Raises:
        ServiceError: they did not start in time.
    """
    others = {process.pid for process in multiprocessing.active_children()}

    def start() -> LocalCluster:
        try:
            # The scheduler makes a folder too, and takes no place for it: it would stay in the temporary directory.
            with dask.config.set({"distributed.nanny.pre-spawn-environ": _ENVIRONMENT, "temporary-directory": folder}):
                return LocalCluster(
                    n_workers=count,
                    threads_per_worker=1,
                    processes=True,
                    resources={RAM: ram_bytes},
                    memory_limit=0,
                    dashboard_address="127.0.0.1:0",
                    local_directory=folder,
                    death_timeout=_START_S,  # of a worker that does not start, or finds no scheduler
                    silence_logs="CRITICAL",
                )
        except Exception as error:  # of Dask, of the event loop or of the system
            got = f"{type(error).__name__}: {error}"
            raise ServiceError(who, got=got, expected="processes that start", fix=_AGAIN) from None

    who = f"{count} local workers"
    try:
        cluster = within(_START_S, who, start, fix=_AGAIN)
        try:
            yield cluster
        finally:
            _close(cluster.close)
    finally:
        for process in multiprocessing.active_children():
            if process.name.startswith(_WORKER) and process.pid not in others:
                process.kill()
                process.join(_CLOSE_S)


def _close(close: Callable[[], object]) -> None:
    """Close what is no longer needed: that it does not end in time, or fails, changes no result."""
    with suppress(Exception):
        within(_CLOSE_S, "cluster", close, fix=_AGAIN)


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]
