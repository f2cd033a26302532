"""The Dask cluster of a sweep: processes on this machine, or any scheduler."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import dask
from distributed import Client, LocalCluster

from edgekv.errors import EngineError, ServiceError, UsageError
from edgekv.system import free_memory_bytes
from exporters.sweep.fitness import RAM

LOCAL = "local"
_TIMEOUT = "10s"
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
        client = Client(scheduler, timeout=_TIMEOUT, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise ServiceError(
            f"--scheduler {scheduler}",
            got=str(error) or type(error).__name__,
            expected="a Dask scheduler that answers, such as tcp://HOST:8786",
            fix="Start one with `dask scheduler`, or use --scheduler local.",
        ) from None
    with client:
        yield client


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
    with (
        tempfile.TemporaryDirectory(prefix="edgekv-sweep-") as folder,
        dask.config.set({"distributed.worker.daemon": False, "distributed.admin.log-format": "%(message)s"}),
        LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            processes=True,
            resources={RAM: max(free_bytes // count, largest_bytes)},
            memory_limit=0,
            dashboard_address="127.0.0.1:0",
            local_directory=folder,
            silence_logs="CRITICAL",
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]
