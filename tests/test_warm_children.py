"""Forked children of tests are children like others."""

import os
import subprocess

import pytest

from edgekv.errors import UsageError
from edgekv.machine import child
from edgekv.machine.child import CallFailedError, Child, ChildEndedError, Limits, call, kill_children
from tests.support.processes import end, look
from tests.support.warm_children import WarmChildren, can_fork

pytestmark = pytest.mark.htp


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_fork():
        pytest.skip("OPENBLAS_NUM_THREADS is not 1")
    monkeypatch.setattr(child, "started", WarmChildren().started)


def test_a_fork_has_the_variables_and_folders_of_the_test(tmp_path, monkeypatch):
    monkeypatch.setenv("A_VARIABLE", "a value")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    assert call(look, ["A_VARIABLE"]) == ["a value", str(tmp_path), str(tmp_path)]


def test_a_fork_that_crashes_hangs_or_raises_ends_alone():
    with Child() as other:
        with pytest.raises(ChildEndedError, match=r"^SIGABRT: the last line$"):
            call(end, "crash")
        with pytest.raises(ChildEndedError, match=r"^no answer within 1 s$") as late:
            call(end, "hang", Limits(timeout_s=1))
        assert late.value.timed_out
        with pytest.raises(UsageError, match="a field: got 1"):
            call(end, "refuse")
        assert len(other.call(look, [])) == 2
        kill_children()
        with pytest.raises(ChildEndedError, match=r"^SIGKILL"):
            other.call(look, [])


def test_a_fork_has_a_limit_of_memory():
    with pytest.raises(CallFailedError, match="MemoryError"):
        call(end, "grow", Limits(memory_bytes=1 << 30))


def test_what_only_a_new_process_reads_begins_one(monkeypatch):
    cold = list[object]()
    popen = subprocess.Popen

    def begin(command, **options):
        cold.append(command)
        return popen(command, **options)

    monkeypatch.setattr(child.subprocess, "Popen", begin)
    call(look, [], Limits(environment={"A": "b"}))
    monkeypatch.setenv("PYTHONPATH", "/nowhere:" + os.environ.get("PYTHONPATH", ""))
    call(look, [])
    assert len(cold) == 2
