"""Child processes end with their parent, within their time, and leave no files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from edgekv.errors import UsageError
from edgekv.machine import child_start
from edgekv.machine.child import (
    CallFailedError,
    Child,
    ChildEndedError,
    Limits,
    call,
    describe_exit,
    run_program,
    vendor_timeout_s,
)
from tests.support.processes import interruptible

PATIENCE_S = 60
FUNCTIONS = """
import os, pathlib, time
from collections.abc import Callable
import msgspec
from edgekv.errors import UsageError

class Pair(msgspec.Struct):
    text: str
    count: int = 1

class OwnError(Exception):
    pass

def repeated(pair: Pair) -> Pair:
    os.system("echo noise")
    print("more noise")
    return Pair(pair.text * pair.count, len(pair.text))

def sleep(file: str) -> None:
    pathlib.Path(file).write_text(str(os.getpid()))
    time.sleep(600)

def sleep_for(seconds: float) -> float:
    time.sleep(seconds)
    return seconds

def count_to(last: int, give: Callable[[Pair], None]) -> None:
    for number in range(last):
        give(Pair(str(number)))

def fail(kind: str) -> int:
    print("the last line", flush=True)
    if kind == "ours":
        raise UsageError("a field", got=1, expected="another", fix="Mend it.")
    if kind == "its own":
        raise OwnError("text", 7)
    if kind == "foreign":
        raise RuntimeError(f"two{chr(10)}lines")
    if kind == "memory":
        bytearray(1 << 40)
    os.abort()
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of child processes, and a temporary directory for this test alone."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "code"), *sys.path]))
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.delitem(sys.modules, "functions", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "code"


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that nobody has waited for."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def pid_in(file: Path) -> int:
    wait_for(lambda: file.exists() and bool(file.read_text()))
    return int(file.read_text())


def function(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(import_module("functions"), name)
    return found


def test_a_reply_comes_back_and_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pair = import_module("functions").Pair
    assert call(function("repeated"), pair("ab", 3), Limits(timeout_s=PATIENCE_S)) == pair("ababab", 2)
    assert capfd.readouterr() == ("", "")
    assert not list((tmp_path / "tmp").iterdir())


def test_a_child_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKV_TIMEOUT_S", "3")
    with pytest.raises(
        ChildEndedError, match=r"^no answer within 3 s \(set EDGEKV_TIMEOUT_S to allow more\)$"
    ) as ended:
        call(function("sleep"), str(tmp_path / "pid"))
    assert ended.value.timed_out and has_ended(pid_in(tmp_path / "pid"))
    assert not list((tmp_path / "tmp").iterdir())


def test_errors_come_back_as_what_they_are() -> None:
    with Child(Limits(memory_bytes=1 << 30)) as child:
        with pytest.raises(UsageError, match=r"a field: got 1; expected another. Mend it.") as raised:
            child.call(function("fail"), "ours")
        assert raised.value.field == "a field"
        with pytest.raises(import_module("functions").OwnError) as own:
            child.call(function("fail"), "its own")
        assert own.value.args == ("text", 7)
        with pytest.raises(CallFailedError, match=r"^RuntimeError: two lines$"):
            child.call(function("fail"), "foreign")
        with pytest.raises(CallFailedError, match=r"^MemoryError$"):
            child.call(function("fail"), "memory")
        with pytest.raises(ChildEndedError, match=r"^SIGABRT: the last line$") as ended:
            child.call(function("fail"), "abort")
        assert not ended.value.timed_out
        with pytest.raises(ChildEndedError, match=r"^SIGABRT"):
            child.call(function("sleep_for"), 0.0)


def test_a_stream_may_be_given_up() -> None:
    with Child(Limits(timeout_s=PATIENCE_S)) as child:
        assert [pair.text for pair in child.stream(function("count_to"), 3)] == ["0", "1", "2"]
        assert next(child.stream(function("count_to"), 100)).text == "0"
        assert child.call(function("sleep_for"), 0.0) == 0
        assert list(child.stream(function("count_to"), 0)) == []


def test_a_program_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKV_TIMEOUT_S", "2")
    end = run_program(["/bin/sleep", "600"])
    assert (end.succeeded, end.ending) == (False, "no answer within 2 s (set EDGEKV_TIMEOUT_S to allow more)")


def test_what_a_program_starts_is_not_waited_for() -> None:
    end = run_program(["/bin/sh", "-c", "sleep 600 & echo $!; echo twice >&2; exit 3"])
    pid, second = end.output.splitlines()
    os.kill(int(pid), signal.SIGKILL)
    assert (end.succeeded, end.ending, second) == (False, "exit code 3", "twice")


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", ""])
def test_a_time_limit_is_a_positive_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("EDGEKV_TIMEOUT_S", text)
    with pytest.raises(UsageError, match=r"EDGEKV_TIMEOUT_S: got .* expected seconds above 0"):
        vendor_timeout_s()


@pytest.mark.parametrize(
    "run", ["from functions import sleep; call(sleep, {job!r})", "run_program(['/bin/sh', '-c', {shell!r}])"]
)
def test_a_child_dies_with_its_parent_and_the_next_process_cleans_up(tmp_path: Path, run: str) -> None:
    file = tmp_path / "pid"
    started = run.format(job=str(file), shell=f"echo $$ > {file}; exec sleep 600")
    code = f"from edgekv.machine.child import call, run_program; {started}"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        pid = pid_in(file)
        parent.kill()
    wait_for(lambda: has_ended(pid))
    (leftover,) = (tmp_path / "tmp").iterdir()
    assert leftover.name.startswith("edgekv-")
    code = "from edgekv.machine.scratch import scratch_folder\nwith scratch_folder('other'): pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.htp
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_command_its_children_and_its_files(small: Path, tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "edgekv", "compile", str(small), "--device", "SM8650"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, preexec_fn=interruptible) as process:
        wait_for(lambda: any((tmp_path / "tmp").glob("edgekv-child-*/log")))
        wait_for(lambda: bool(children_of(process.pid)))
        children = children_of(process.pid)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number
    assert out == "" and "Traceback" not in err
    assert all(has_ended(child) for child in children)
    assert not list((tmp_path / "tmp").iterdir())
    assert not list(small.glob("compiled/*"))


@pytest.mark.htp
def test_a_compiler_that_hangs_ends_the_command_within_the_time_limit(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vendor's compiler itself, stopped from outside."""
    monkeypatch.setenv("EDGEKV_TIMEOUT_S", "3")
    command = [sys.executable, "-m", "edgekv", "compile", str(small), "--device", "SM8650"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: bool(children_of(process.pid)))
        stopped = children_of(process.pid)
        for child in stopped:
            os.kill(child, signal.SIGSTOP)
        out, err = process.communicate(timeout=PATIENCE_S)
    message = " ".join(err.split())
    assert (process.returncode, out) == (1, "") and "Traceback" not in err
    assert "the HTP compiler ended with no answer within 3 s (set EDGEKV_TIMEOUT_S to allow more)" in message
    assert all(has_ended(child) for child in stopped)
    assert not list((tmp_path / "tmp").iterdir()) and not list(small.glob("compiled/*"))


def children_of(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if f"\nPPid:\t{pid}\n" in status.read_text():
                found.append(int(status.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    """As under nohup."""
    code = (
        "import os, signal\n"
        "from edgekv.cli.exit_codes import exit_code_of, signals_as_exceptions\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with signals_as_exceptions():\n"
        "    print(exit_code_of(lambda: os.kill(os.getpid(), signal.SIGHUP)))\n"
        "    print(exit_code_of(lambda: os.kill(os.getpid(), signal.SIGTERM)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "143"]


def test_where_linux_does_not_help_a_child_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for platform in ("darwin", "win32"):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(child_start.ctypes, "CDLL", lambda name: pytest.fail("no prctl there"))
        child_start.die_with(os.getppid())


def test_a_program_on_windows_keeps_its_exit_code() -> None:
    """There `execv` starts another process and ends this one with 0."""
    program = (
        "import os, sys; from edgekv.machine import child_start; os.name = 'nt'; os.execv = None; "
        f"sys.argv = ['child_start', '0', 'program', {sys.executable!r}, '-c', 'exit(3)']; child_start.main()"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 3


@pytest.mark.parametrize(
    ("code", "text"), [(3, "exit code 3"), (-9, "SIGKILL"), (0xC0000005, "exit code 0xC0000005"), (-200, "signal 200")]
)
def test_ends_are_named(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_a_child_that_hangs_in_a_later_call_ends() -> None:
    """One timer watches all calls: the time of each counts from its own beginning. The first starts Python."""
    with Child(Limits(timeout_s=5)) as child:
        assert child.call(function("sleep_for"), 0.0) == 0
        time.sleep(0.5)
        began = time.monotonic()
        with pytest.raises(ChildEndedError, match=r"^no answer within 5 s$"):
            child.call(function("sleep_for"), 600.0)
        assert time.monotonic() - began > 4.9
