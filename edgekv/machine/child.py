"""Work in a child process, so that a crash or hang of a vendor library does not take the caller down."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Literal

from edgekv.errors import UsageError
from edgekv.machine.scratch import scratch_folder

TIMEOUT_VARIABLE = "EDGEKV_TIMEOUT_S"

_TIMEOUT_S = 4 * 3600.0  # compiling all graphs of a large part takes tens of minutes on a laptop
_LOG_BYTES = 1 << 16
_FIRST_NT_ERROR = 0x8000_0000
_NOTHING: Mapping[str, str] = MappingProxyType({})
_running: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """How a child process ended.

    Attributes:
        reply: what it replied; None if it crashed, hung, or replied nothing.
        ending: for messages: its exit code or signal, and the last line of its standard error.
    """

    reply: bytes | None
    ending: str


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program ended.

    Attributes:
        succeeded: whether its exit code is 0.
        ending: for messages: its exit code or signal.
        output: the end of its standard output and standard error.
    """

    succeeded: bool
    ending: str
    output: str


def vendor_timeout_s() -> float:
    """Time limit for vendor libraries and programs: EDGEKV_TIMEOUT_S, or 4 hours.

    Raises:
        UsageError: the variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return _TIMEOUT_S
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = math.nan
    if not 0 < limit_s < math.inf:
        raise UsageError(TIMEOUT_VARIABLE, got=repr(text), expected="seconds above 0", fix="Use 3600, or unset it.")
    return limit_s


def run_in_child(
    module: str, job: bytes, *, timeout_s: float | None = None, environment: Mapping[str, str] = _NOTHING
) -> ChildEnd:
    """Run `python -m MODULE REPLY`, which reads the job from standard input and writes its reply to the file REPLY.

    Nothing that it prints reaches the terminal: vendor libraries print to standard output too.

    Args:
        module: the module to run.
        job: its standard input.
        timeout_s: it is killed after this time; None for `vendor_timeout_s`.
        environment: variables to set in addition to those of this process.
    """
    limit_s = vendor_timeout_s() if timeout_s is None else timeout_s
    with scratch_folder("child") as folder:
        reply, given = folder / "reply", folder / "job"
        given.write_bytes(job)
        with given.open("rb") as stdin:
            code, output = _run("module", [module, str(reply)], folder, limit_s, environment, stdin, subprocess.DEVNULL)
        ending = _ending(code, limit_s, is_vendor_limit=timeout_s is None)
        if code is not None:
            ending += f": {_last_line(output)}"
        return ChildEnd(reply.read_bytes() if code is not None and reply.exists() else None, ending)


def run_program(command: Sequence[str], *, environment: Mapping[str, str] = _NOTHING) -> ProgramEnd:
    """Run a vendor's program within `vendor_timeout_s`.

    Args:
        command: its absolute path and its arguments.
        environment: variables to set in addition to those of this process.
    """
    limit_s = vendor_timeout_s()
    with scratch_folder("program") as folder:
        code, output = _run("program", command, folder, limit_s, environment, subprocess.DEVNULL, None)
    return ProgramEnd(code == 0, _ending(code, limit_s, is_vendor_limit=True), output)


@contextmanager
def started(
    kind: Literal["module", "program"],
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    dies_with_thread: bool,
    stdin: int | IO[bytes],
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
) -> Iterator[subprocess.Popen[bytes]]:
    """A child process, killed if it is still running when the block ends, or when this process dies (on Linux).

    Args:
        kind: whether the command starts with a Python module or a program.
        command: the module or program, and its arguments.
        environment: variables to set in addition to those of this process.
        dies_with_thread: whether Linux may kill the child when the calling thread ends; that thread must outlive the
            child.
        stdin: as for `subprocess.Popen`.
        stdout: as for `subprocess.Popen`.
        stderr: as for `subprocess.Popen`.
    """
    parent = os.getpid() if dies_with_thread else 0
    # Alone, in front of a program: reading site-packages would take longer than all else.
    alone = ["-IS", str(Path(__file__).with_name("child_start.py"))]
    start = ["-m", "edgekv.machine.child_start"] if kind == "module" else alone
    child = subprocess.Popen(
        [sys.executable, *start, str(parent), kind, *command],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **environment},
    )
    _running.add(child)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        _running.discard(child)


def kill_children() -> None:
    """Kill all children, so that threads waiting for them continue."""
    for child in tuple(_running):
        child.kill()


def describe_exit(returncode: int) -> str:
    """How a child process ended: its exit code, or the name of the signal that ended it."""
    if returncode >= _FIRST_NT_ERROR:  # a crash on Windows, such as 0xC0000005, an access violation
        return f"exit code 0x{returncode:X}"
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def _run(
    kind: Literal["module", "program"],
    command: Sequence[str],
    folder: Path,
    limit_s: float,
    environment: Mapping[str, str],
    stdin: int | IO[bytes],
    stdout: int | None,
) -> tuple[int | None, str]:
    """Run to the end, and return the exit code and the end of the output; no exit code after the time limit.

    Standard error, and standard output if `stdout` is None, go to a file: a pipe would stay open as long as any process
    that the child started.
    """
    with (folder / "log").open("w+b") as log:
        out = log if stdout is None else stdout
        with started(kind, command, environment, dies_with_thread=True, stdin=stdin, stdout=out, stderr=log) as child:
            try:
                code = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
        return code, log.read().decode("utf-8", "replace")


def _ending(code: int | None, limit_s: float, *, is_vendor_limit: bool) -> str:
    if code is not None:
        return describe_exit(code)
    more = f" (set {TIMEOUT_VARIABLE} to allow more)" if is_vendor_limit else ""
    return f"no answer within {limit_s:g} s{more}"


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
