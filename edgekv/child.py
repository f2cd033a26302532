"""Work in a child process: a crash of a vendor library never takes the caller down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """How a child process ended.

    Attributes:
        reply: what it replied, or None if it did not get that far.
        ending: for messages: its exit code or signal, and the last line on its standard error.
    """

    reply: bytes | None
    ending: str


def run_in_child(
    module: str, job: bytes, *, timeout_s: float | None = None, environment: Mapping[str, str] = _NOTHING
) -> ChildEnd:
    """Run `python -m MODULE REPLY`, which reads the job on standard input and writes its reply into the file REPLY.

    What it prints is kept off the terminal: vendor libraries print to standard output too.

    Args:
        module: what to run.
        job: for its standard input.
        timeout_s: kill it after so many seconds.
        environment: variables to set besides those of this process.
    """
    with tempfile.TemporaryDirectory(prefix="edgekv-child-") as scratch:
        reply = Path(scratch) / "reply"
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, str(reply)],
                input=job,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, **environment},
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ChildEnd(None, f"no answer within {timeout_s:g} s")
        ending = f"{describe_exit(done.returncode)}: {_last_line(done.stderr)}"
        return ChildEnd(reply.read_bytes() if reply.exists() else None, ending)


def describe_exit(returncode: int) -> str:
    """How a child process ended: its exit code, or the name of the signal that ended it."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def _last_line(raw: bytes) -> str:
    lines = [line for line in raw.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
