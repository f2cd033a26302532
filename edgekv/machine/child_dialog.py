"""A child process that is asked more than once, so that a crash or hang of a vendor library ends it alone."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from time import monotonic
from types import TracebackType
from typing import Self

from edgekv.machine.child import describe_exit, started, vendor_timeout_s

_CLOSING_S = 10


class ChildDialog:
    """`python -m MODULE ARGUMENTS`, which reads lines from standard input and answers with lines. A context manager.

    Its standard error goes to a file.

    Attributes:
        timed_out: whether it was killed because a line did not come in time.
        timeout_s: the time limit of a line.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Start it.

        Args:
            module: the module to run.
            arguments: its arguments.
            environment: variables to set in addition to those of this process.
            timeout_s: the time limit of a line; None for `vendor_timeout_s`.

        Raises:
            UsageError: the time limit in the environment is not a positive number.
        """
        self.timeout_s = vendor_timeout_s() if timeout_s is None else timeout_s
        self.timed_out = False
        self._lock = threading.Lock()
        self._read_began: float | None = None
        self._watch: threading.Timer | None = None
        self._open = ExitStack()
        self._log = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._child = self._open.enter_context(
            started(
                "module",
                [module, *arguments],
                environment or {},
                dies_with_thread=threading.current_thread() is threading.main_thread(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, line: bytes) -> bool:
        """Send a line; False if the child has ended."""
        assert self._child.stdin is not None, "opened with a pipe"
        try:
            self._child.stdin.write(line + b"\n")
            self._child.stdin.flush()
        except (BrokenPipeError, ValueError):
            return False
        return True

    def read(self) -> bytes:
        """The next line; none if the child ended, or did not answer in time, which ends it."""
        assert self._child.stdout is not None, "opened with a pipe"
        with self._lock:
            self._read_began = monotonic()
            if self._watch is None:  # one thread serves many lines: starting it takes longer than most answers
                self._start_watch(self.timeout_s)
        try:
            return self._child.stdout.readline()
        finally:
            self._read_began = None

    def kill(self) -> None:
        """End the child at once, from any thread; `read` then gives nothing."""
        self._child.kill()

    def exit_text(self) -> str:
        """How the child ended, once `read` gave nothing: its exit code, or the name of a signal."""
        try:
            code = self._child.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:  # it closed its output and goes on
            self._child.kill()
            code = self._child.wait()
        return describe_exit(code)

    def log(self) -> list[str]:
        """The lines of its standard error so far; none once it was closed."""
        if self._log.closed:
            return []
        file = self._log.fileno()  # its position is the child's
        text = os.pread(file, os.fstat(file).st_size, 0).decode("utf-8", "replace")
        return [line.strip() for line in text.splitlines() if line.strip()]

    def close(self) -> None:
        """End the child. A second call does nothing."""
        assert self._child.stdin is not None, "opened with a pipe"
        assert self._child.stdout is not None, "opened with a pipe"
        if self._watch is not None:
            self._watch.cancel()
        with self._open:
            with suppress(BrokenPipeError):
                self._child.stdin.close()
            with suppress(subprocess.TimeoutExpired):  # killed then
                self._child.wait(_CLOSING_S)
            self._child.stdout.close()

    def _start_watch(self, seconds: float) -> None:
        self._watch = threading.Timer(seconds, self._check_time)
        self._watch.daemon = True
        self._watch.start()

    def _check_time(self) -> None:
        """Kill the child if its line is late; watch on if that was for an earlier line."""
        with self._lock:
            self._watch, began = None, self._read_began
            if began is None:
                return
            left_s = began + self.timeout_s - monotonic()
            if left_s > 0:
                self._start_watch(left_s)
            else:
                self.timed_out = True
                self._child.kill()
