"""Each wait of a command on a cluster has a limit, and an error that names whom it waits for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from distributed import Client

from edgekv.errors import ServiceError
from exporters.options import LOCAL, Cluster
from exporters.pipeline.dask import cluster as local_cluster, run as distribute
from exporters.pipeline.dask.cluster import connected
from exporters.pipeline.dask.fitness import versions
from exporters.pipeline.dask.limit import within
from exporters.pipeline.dask.run import check_workers, run_on
from exporters.pipeline.piece import Piece, Plan
from exporters.pipeline.store import PieceStore
from tests.support.processes import WAIT_S, Die, Hold, Sleep, Waiting, machines

GB = 10**9


def carry(folder: Path, *works: Piece, ram_bytes: int = 1, **changes) -> list[object]:
    """Do pieces that need nothing, and return their answers."""
    store, plan = PieceStore(str(folder / "pieces")), Plan()
    names = [plan.put(work, ram_bytes) for work in works]
    cluster = Cluster(**{"scheduler": LOCAL, "workers": 1, "say": [].append, **changes})
    run_on(cluster, plan, names, store, None, None, disk_bytes=1)
    found = [store.find(name) for name in names]
    return [msgspec.json.decode(each.answer) for each in found if each is not None]


def workers_left() -> list[str]:
    return [each.name for each in multiprocessing.active_children() if each.name.startswith("Dask Worker")]


def when(folder: Path, act: Callable[[], None]) -> threading.Thread:
    """Act as soon as the piece runs."""

    def wait() -> None:
        end = time.monotonic() + 60
        while not [*folder.glob("pieces/pid-*")] and time.monotonic() < end:
            time.sleep(0.05)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_call_has_a_limit_and_its_result_or_error_arrives():
    assert within(10, "who", lambda: 3, fix="Wait.") == 3
    with pytest.raises(KeyError):
        within(10, "who", lambda: {}["key"], fix="Wait.")
    with pytest.raises(ServiceError, match=r"^who: got no answer within 0.01 s; expected an answer. Wait more.$"):
        within(0.01, "who", threading.Event().wait, fix="Wait more.")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_piece_that_does_not_end(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEKV_TIMEOUT_S", "2")
    monkeypatch.setattr(distribute, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(local_cluster, "_CLOSE_S", 1.0)
    with pytest.raises(ServiceError, match=r"pieces: got none finished within 2 s, after 0 of 1.*EDGEKV_TIMEOUT_S=4"):
        carry(tmp_path, Sleep(600))
    assert not workers_left()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_piece_that_kills_its_workers(tmp_path):
    with pytest.raises(ServiceError, match=r"piece test-[0-9a-f]+: got 4 workers that died of it.*need 0.00 GB"):
        carry(tmp_path, Die())
    assert not workers_left()


@pytest.mark.slow
@pytest.mark.thorough
def test_local_workers_that_do_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(local_cluster, "_START_S", 0.05)
    with pytest.raises(ServiceError, match=r"1 local workers: got .*finished pieces are not done again"):
        carry(tmp_path, Sleep(0))


HELD = """
import time
from exporters.options import LOCAL
from exporters.pipeline.dask.cluster import connected
if __name__ == "__main__":
    with connected(LOCAL, 1, 1):
        print("started", flush=True)
        time.sleep(600)
"""


LISTED = """
import tempfile
from pathlib import Path
from exporters.options import LOCAL
from exporters.pipeline.dask.cluster import connected
if __name__ == "__main__":
    with connected(LOCAL, 1, 1):
        print(*(path.name.partition("-")[0] for path in Path(tempfile.gettempdir()).iterdir()))
"""


@pytest.mark.slow
def test_local_workers_leave_nothing_in_the_temporary_directory(tmp_path):
    """A process of its own: Dask's configuration is that of a process, and clusters of other tests may be ending."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "listed.py").write_text(LISTED)
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, str(tmp_path / "listed.py")]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "edgekv\n"
    assert not [*temporary.iterdir()]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_next_start_removes_what_a_killed_command_left(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "held.py").write_text(HELD)
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, str(tmp_path / "held.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as held:
        assert held.stdout is not None and held.stdout.readline() == b"started\n"
        os.killpg(held.pid, signal.SIGKILL)
    (left,) = temporary.glob("edgekv-cluster-*")
    program = "from edgekv.machine.scratch import scratch_folder\nwith scratch_folder('test'): pass"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=WAIT_S)
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_scheduler_that_stops_answering(tmp_path, monkeypatch):
    monkeypatch.setattr(distribute, "_ANSWER_S", 5.0)
    monkeypatch.setattr(distribute, "_CANCEL_S", 1.0)
    monkeypatch.setattr(local_cluster, "_CLOSE_S", 1.0)
    with machines(tmp_path) as made:
        made.start_worker("only")
        when(tmp_path, lambda: made.signal("scheduler", signal.SIGSTOP))
        with pytest.raises(ServiceError, match=r"scheduler: got no answer within 5 s"):
            carry(tmp_path, Sleep(600), workers=None, scheduler=made.address)
    (tmp_path / "machines").mkdir()
    with machines(tmp_path / "machines") as made:
        address = made.address
        made.signal("scheduler", signal.SIGSTOP)
        monkeypatch.setattr(local_cluster, "_CONNECT_S", 1.0)
        with pytest.raises(ServiceError, match=r"--scheduler tcp://.*expected "):
            carry(tmp_path, Sleep(600), workers=None, scheduler=address)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_worker_answers_while_it_fetches_the_checkpoint(tmp_path):
    store = PieceStore(str(tmp_path))
    requirements = Waiting(versions(), None, None, store, "probe", 1)
    with machines(tmp_path) as made, connected(made.address, None, 1) as client, ThreadPoolExecutor() as pool:
        made.start_worker("only")
        looked = pool.submit(check_workers, client, requirements, 1, keep_going=False, say=[].append)
        end = time.monotonic() + WAIT_S
        while not (tmp_path / "looking").exists() and time.monotonic() < end:
            time.sleep(0.02)
        client.run((tmp_path / "answered").touch)
        assert looked.result(WAIT_S) is None, "it says why it does not fit"


@pytest.mark.slow
@pytest.mark.thorough
def test_only_workers_without_enough_ram_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(distribute, "_PATIENCE_S", 3.0)
    with machines(tmp_path) as made:
        made.start_worker("large", ram_bytes=2 * GB)

        def replace() -> None:
            made.start_worker("small", ram_bytes=GB)
            with Client(made.address) as client:
                client.wait_for_workers(2, WAIT_S)
            made.kill("large")

        when(tmp_path, replace)
        with pytest.raises(ServiceError, match=r"workers: got none that fits for 3 s, after 0 of 1 .* 1.50 GB of RAM"):
            carry(tmp_path, Sleep(600), ram_bytes=3 * GB // 2, workers=None, scheduler=made.address)


@pytest.mark.slow
@pytest.mark.thorough
def test_pieces_of_one_worker_never_take_more_ram_than_it_has(tmp_path):
    works = [Hold(30_000_000, number) for number in range(4)]
    with machines(tmp_path) as made:
        made.start_worker("narrow", ram_bytes=50_000_000, threads=3)
        most = carry(tmp_path / "one", *works, ram_bytes=30_000_000, workers=None, scheduler=made.address)
        assert most == [30_000_000] * 4, "one after another, though there are three threads"
        made.kill("narrow")
        made.start_worker("wide", ram_bytes=70_000_000, threads=3)
        most = carry(tmp_path / "two", *works, ram_bytes=30_000_000, workers=None, scheduler=made.address)
        assert max(most) == 60_000_000, "two at a time"
