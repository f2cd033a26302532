"""How the compilation of a bundle scales over pinned workers: wall time with 1, 2, ... of them, and the same bytes.

    python -m benchmarks.sweep_compile BUNDLE [--device SM8750] [--workers 1,2]

Each worker is a process pinned to a core of its own, with its compiler; the store is a new folder for each run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devices import find
from edgekv.bundle import open_bundle
from exporters.htp.compile import COMPILER_DEFAULTS, unwatched
from exporters.sweep.carry import Where
from exporters.sweep.single import compile_on

WAIT_S = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device", default="SM8750")
    parser.add_argument("--workers", default="1,2")
    arguments = parser.parse_args()
    first_s, written = 0.0, None
    print("workers  seconds  x one worker  same bytes")
    for count in map(int, arguments.workers.split(",")):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shutil.copytree(arguments.bundle, folder / "bundle")
            shutil.rmtree(folder / "bundle" / "compiled", ignore_errors=True)
            with cluster(folder, count) as address:
                where = Where(folder, scheduler=address, say=lambda line: None)
                start = time.perf_counter()
                options = {"each": None, "force": False, "watch": unwatched, "options": COMPILER_DEFAULTS}
                made = compile_on(open_bundle(folder / "bundle"), find(arguments.device), where, **options)
                taken_s = time.perf_counter() - start
        hashes = {file: record.sha256 for file, record in made.files.items()}
        first_s, written = first_s or taken_s, written or hashes
        print(f"{count:7}  {taken_s:7.1f}  {first_s / taken_s:12.2f}  {'yes' if hashes == written else 'NO':>10}")


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[str]:
    """A scheduler and pinned workers; yields its address when all are there."""
    file, cores, started = folder / "scheduler.json", sorted(os.sched_getaffinity(0)), []
    options = ["--port", "0", "--host", "127.0.0.1", "--no-dashboard", "--scheduler-file", str(file)]
    try:
        started.append(_start(["distributed.cli.dask_scheduler", *options], cores[0], folder))
        end = time.monotonic() + WAIT_S
        while not file.exists():
            if time.monotonic() > end:
                raise SystemExit(f"no scheduler within {WAIT_S} s")
            time.sleep(0.05)
        address: str = json.loads(file.read_text())["address"]
        for number in range(workers):
            options = ["--nworkers", "1", "--nthreads", "1", "--no-dashboard", "--no-nanny", "--resources", "RAM=8e9"]
            command = ["distributed.cli.dask_worker", address, *options]
            started.append(_start(command, cores[number % len(cores)], folder / str(number)))
        from distributed import Client

        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(workers, timeout=WAIT_S)
        yield address
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(WAIT_S)


def _start(command: list[str], core: int, cache: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "EDGEKV_CACHE_DIR": str(cache)},
        start_new_session=True,
    )
    os.sched_setaffinity(process.pid, {core})
    return process


if __name__ == "__main__":
    main()
