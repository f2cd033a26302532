"""The one place where exceptions become messages and exit codes."""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

from devices import UnknownDeviceError
from edgekv.errors import EdgeKVError
from edgekv.machine.child import kill_children

DEBUG_VARIABLE = "EDGEKV_DEBUG"

_LONGEST_IMPORT_S = 10.0
_POLL_S = 0.01
_AGAIN_S = 1.0
_HAS_TIMERS = hasattr(signal, "setitimer")  # Windows has none
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP


class TerminatedError(BaseException):
    """SIGTERM or SIGHUP arrived. Like KeyboardInterrupt it passes `except Exception`, so that cleanup runs."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code_of(call: Callable[[], None]) -> int:
    """Run a call, and print what went wrong as one line on standard error, without a traceback.

    EDGEKV_DEBUG=1 in the environment adds the traceback.

    Returns:
        0, 1 for an error, 2 for a wrong command line, or 128 plus the number of the signal that ended it.
    """
    try:
        call()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except TerminatedError as end:
        return 128 + end.number
    except Exception as error:
        if is_closed_pipe(error):
            # The reader of our output is gone; the flush at the interpreter's exit must not complain either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return report(error)
    return 0


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into exceptions, so that unfinished files are removed and children end.

    A signal that the parent chose to ignore, as `nohup` does, stays ignored. Outside the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    caught = [number for number in numbers if before[number] in (signal.SIG_DFL, signal.default_int_handler)]
    handler = _Raise()
    for number in caught:
        signal.signal(number, handler)
    try:
        yield
    finally:
        if _HAS_TIMERS:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number in caught:
            signal.signal(number, before[number])


@contextmanager
def held_signals(arrived: Callable[[], None]) -> Iterator[None]:
    """Hold SIGTERM and SIGHUP back until the end, where they raise as they do elsewhere.

    For an event loop: an exception that comes at any of its lines is lost in a callback, or leaves tasks for which
    the loop then waits forever.

    Args:
        arrived: is called in the main thread when a signal comes, and makes the loop end. It must not raise.
    """
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)
        arrived()

    numbers = [getattr(signal, name) for name in _SIGNALS if name != "SIGINT" and hasattr(signal, name)]
    before = {number: handler for number in numbers if isinstance(handler := signal.getsignal(number), _Raise)}
    for number in before:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


class _Raise:
    """A signal handler: kills the children, for which other threads may wait, and raises.

    Not within an import, unless that takes too long: native modules turn any exception into an ImportError, and
    callbacks of the import system drop it. The signal comes again instead; also later, if its exception was lost in
    another callback.
    """

    def __init__(self) -> None:
        self._end = math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        kill_children()
        self._end = min(self._end, monotonic() + _LONGEST_IMPORT_S)
        if _is_import(frame) and monotonic() < self._end and _HAS_TIMERS:
            _send_again(number, _POLL_S)
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if not _HAS_TIMERS:
            signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the cleanup
        else:
            _send_again(number, _AGAIN_S)
            if _is_ending():
                return
        raise TerminatedError(number)


def _send_again(number: int, after_s: float) -> None:
    """Send a signal to this process, to whatever handler is set."""
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(number))
    signal.setitimer(signal.ITIMER_REAL, after_s)


def _is_ending() -> bool:
    """Whether the cleanup of an earlier signal runs."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, TerminatedError):
        error = error.__context__
    return error is not None


def _is_import(frame: FrameType | None) -> bool:
    """Whether a frame runs in an import."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def is_closed_pipe(error: Exception) -> bool:
    """Whether the reader of a pipe is gone: on Windows that is EINVAL, without the name of a file."""
    if not isinstance(error, OSError):
        return False
    return error.errno == errno.EPIPE or (os.name == "nt" and error.errno == errno.EINVAL and error.filename is None)


def report(error: Exception) -> int:
    """Print an error as one line on standard error, with EDGEKV_DEBUG=1 also its traceback.

    Returns:
        The exit code of the process if it ends with this error.
    """
    if os.environ.get(DEBUG_VARIABLE) == "1":
        traceback.print_exception(error)
    print(f"edgekv: error: {_message(error)}", file=sys.stderr)
    return error.exit_code if isinstance(error, EdgeKVError) else 2 if isinstance(error, UnknownDeviceError) else 1


def _message(error: Exception) -> str:
    if isinstance(error, (EdgeKVError, UnknownDeviceError)):
        return str(error)
    if isinstance(error, OSError):
        place = "" if error.filename is None else f"{error.filename}: "
        return f"{place}{error.strerror or error}"
    if isinstance(error, MemoryError):
        return "not enough memory"
    return (
        f"{type(error).__name__}: {error}. This is a bug; please report it with the output of "
        f"{DEBUG_VARIABLE}=1 edgekv ..."
    )
