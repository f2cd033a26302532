"""Work in a child process, so that a crash or hang of a vendor library or a foreign file does not take the caller down.

`call` runs one function in a process of its own; a `Child` runs several, one after another. What a function takes and
returns are JSON of the types of its annotations, not pickles: a child that reads a hostile file may be hostile too. A
line of the child's standard input is [FUNCTION, JOB]; each line of its answer is a `Message`.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from time import monotonic
from types import MappingProxyType, TracebackType
from typing import IO, Any, Literal, NamedTuple, Self, TypeVar, get_args, get_type_hints

import msgspec

from edgekv import errors
from edgekv.errors import EdgeKVError, UsageError
from edgekv.machine.decoding import DECODERS
from edgekv.machine.scratch import scratch_folder

_ON_WINDOWS = sys.platform == "win32"


class Message(msgspec.Struct, frozen=True):
    """An item of a stream, what a function returned, or what it raised.

    Attributes:
        value: JSON: the item; what was returned; or the arguments of the error.
        is_last: whether the call has ended.
        error: the name of the type of the error.
    """

    value: msgspec.Raw
    is_last: bool = True
    error: str | None = None


class Codecs(NamedTuple):
    """Types of the values of a function; `item` is what the function gives its second argument, if it has one."""

    job: Any
    reply: Any
    item: Any


def name_of(function: Callable[..., Any]) -> str:
    """As `module:name`."""
    assert function.__module__ != "__main__" and "." not in function.__qualname__, "a function of a module"
    return f"{function.__module__}:{function.__qualname__}"


@cache
def codecs(function: Callable[..., Any]) -> Codecs:
    """The types of a function's annotations."""
    hints = get_type_hints(function)
    job, *emit = inspect.signature(function).parameters
    item = get_args(hints[emit[0]])[0][0] if emit else None
    return Codecs(hints[job], hints["return"], item)


def error_types(function: Callable[..., Any]) -> dict[str, type[Exception]]:
    """The types of errors that come back as they are, by name: edgekv's, and those that the function's module has."""
    module = sys.modules[function.__module__]
    types = (value for home in (errors, module) for value in vars(home).values() if isinstance(value, type))
    homes = (errors.__name__, module.__name__)
    return {
        error_type.__name__: error_type
        for error_type in types
        if issubclass(error_type, Exception) and error_type.__module__ in homes
    }


def serve(memory_bytes: int, timeout_s: float) -> None:
    """The child process: run what is asked for until standard input ends. What is printed goes to standard error.

    Args:
        memory_bytes: limit of the address space; 0 for none.
        timeout_s: the process ends when a call takes longer, even if the parent is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent
    if memory_bytes:
        with suppress(ImportError):
            _limit_memory(memory_bytes)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a descriptor
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)

    def send(value: object, *, is_last: bool = True, error: str | None = None) -> None:
        replies.write(msgspec.json.encode(Message(msgspec.Raw(msgspec.json.encode(value)), is_last, error)) + b"\n")

    for line in requests:
        name, job = DECODERS[tuple[str, msgspec.Raw]].decode(line)
        if not _ON_WINDOWS:
            signal.setitimer(signal.ITIMER_REAL, timeout_s + 1)
        module, _, attribute = name.partition(":")
        function = getattr(import_module(module), attribute)
        types = codecs(function)
        try:
            arguments = [DECODERS[types.job].decode(job)]
            if types.item is not None:
                arguments.append(lambda item: send(item, is_last=False))
            send(function(*arguments))
        except Exception as error:
            _send_error(error, function, send)
        if not _ON_WINDOWS:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _send_error(error: Exception, function: Callable[..., Any], send: Callable[..., None]) -> None:
    name = type(error).__name__
    if isinstance(error, errors.EdgeKVError):
        kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in error_types(function))
        send([error.field, str(error.got), str(error.expected), error.fix], error=kind)
    elif error_types(function).get(name) is type(error):
        send(json.loads(json.dumps(error.args, default=str)), error=name)
    else:
        send([" ".join(str(error).split())], error=name)


def _limit_memory(limit_bytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # macOS, or a lower limit is set
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


TIMEOUT_VARIABLE = "EDGEKV_TIMEOUT_S"

_TIMEOUT_S = 4 * 3600.0  # compiling all graphs of a large part takes tens of minutes on a laptop
_LOG_BYTES = 1 << 16
_CLOSING_S = 10
_FIRST_NT_ERROR = 0x8000_0000
_NOTHING: Mapping[str, str] = MappingProxyType({})
_running: set[subprocess.Popen[bytes]] = set()

Job = TypeVar("Job")
Reply = TypeVar("Reply")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a child process may take.

    Attributes:
        timeout_s: it is killed when a call takes longer; None for `vendor_timeout_s`.
        memory_bytes: its address space, on Linux; None for no limit. With one it leaves no core dump.
        environment: variables to set in addition to those of this process.
    """

    timeout_s: float | None = None
    memory_bytes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class ChildEndedError(Exception):
    """The child process crashed, or was killed because it did not answer in time.

    Attributes:
        ending: for messages: its exit code or signal and the last line of its log, or the time limit.
        timed_out: whether it was killed after the time limit.
        log: the lines of its standard output and standard error.
    """

    def __init__(self, ending: str, *, timed_out: bool, log: Sequence[str]) -> None:
        super().__init__(ending)
        self.ending = ending
        self.timed_out = timed_out
        self.log = log


class CallFailedError(Exception):
    """The function raised an error that is none of edgekv's and none of its own module's.

    Attributes:
        kind: the name of its type.
        text: its message, in one line.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}" if text else kind)
        self.kind = kind
        self.text = text


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


_NO_LIMITS = Limits()


def call(function: Callable[[Job], Reply], job: Job, limits: Limits = _NO_LIMITS) -> Reply:
    """Run a function in a process of its own.

    Args:
        function: of a module; its annotations say what JSON has of the job and of what it returns.
        limits: of the process.

    Raises:
        EdgeKVError: as the function raised it, as are errors of its own module.
        CallFailedError: it raised another error.
        ChildEndedError: the process crashed, or did not answer in time.
    """
    with Child(limits, is_waited_for=True) as child:
        return child.call(function, job)


class Child:
    """A child process that runs functions, one at a time; a context manager.

    It keeps what modules hold between calls. All that libraries print goes to its log. It ends with this process.
    """

    def __init__(self, limits: Limits = _NO_LIMITS, *, is_waited_for: bool = False) -> None:
        """Start it.

        Args:
            limits: of the process.
            is_waited_for: whether the calling thread outlives it. On Linux it then ends with that thread, otherwise
                only with the main thread.

        Raises:
            UsageError: the time limit in the environment is not a positive number.
        """
        self._limits = limits
        self._timeout_s = vendor_timeout_s() if limits.timeout_s is None else limits.timeout_s
        self._timed_out = False
        self._is_answering = False
        self._lock = threading.Lock()
        self._read_began: float | None = None
        self._watch: threading.Timer | None = None
        self._open = ExitStack()
        folder = self._open.enter_context(scratch_folder("child"))
        self._log = self._open.enter_context((folder / "log").open("w+b"))
        self._process = self._open.enter_context(
            started(
                "calls",
                [str(limits.memory_bytes or 0), str(self._timeout_s)],
                limits.environment,
                dies_with_thread=is_waited_for or threading.current_thread() is threading.main_thread(),
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

    def call(self, function: Callable[[Job], Reply], job: Job) -> Reply:
        """Run a function; see `call`."""
        self._send(function, job)
        message = self._next(function)
        result: Reply = DECODERS[codecs(function).reply].decode(message.value)
        return result

    def stream(self, function: Callable[[Job, Callable[[Item], None]], None], job: Job) -> Iterator[Item]:
        """Run a function, and yield each item when it gives it to its second argument. Errors are those of `call`."""
        self._send(function, job)
        item_type = codecs(function).item
        while not (message := self._next(function)).is_last:
            yield DECODERS[item_type].decode(message.value)

    def kill(self) -> None:
        """End the child at once, from any thread; a call in progress raises ChildEndedError."""
        self._process.kill()

    def log(self) -> list[str]:
        """The last lines of what was printed so far; none once it was closed."""
        if self._log.closed:
            return []
        file = self._log.fileno()
        size = os.fstat(file).st_size
        start = max(0, size - _LOG_BYTES)
        with open(self._log.name, "rb") as log:  # noqa: PTH123 - the position of the open file is the child's
            log.seek(start)
            text = log.read().decode("utf-8", "replace")
        return [line.strip() for line in text.splitlines() if line.strip()]

    def close(self) -> None:
        """End the child. A second call does nothing."""
        assert self._process.stdin is not None and self._process.stdout is not None, "opened with pipes"
        if self._watch is not None:
            self._watch.cancel()
        with self._open:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):  # killed then
                self._process.wait(_CLOSING_S)
            self._process.stdout.close()

    def _send(self, function: Callable[..., Any], job: object) -> None:
        assert self._process.stdin is not None, "opened with a pipe"
        while self._is_answering:  # a stream that was given up
            self._next_message()
        line = msgspec.json.encode([name_of(function), job])
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._ended() from None
        self._is_answering = True

    def _next(self, function: Callable[..., Any]) -> Message:
        """The next message that is no error."""
        message = self._next_message()
        if message.error is None:
            return message
        kind = error_types(function).get(message.error)
        if kind is None:
            raise CallFailedError(message.error, *json.loads(bytes(message.value)))
        if issubclass(kind, EdgeKVError):
            field, got, expected, fix = json.loads(bytes(message.value))
            raise kind(field, got=got, expected=expected, fix=fix)
        raise kind(*json.loads(bytes(message.value)))

    def _next_message(self) -> Message:
        line = self._read()
        if not line:
            raise self._ended()
        message = DECODERS[Message].decode(line)
        self._is_answering = not message.is_last
        return message

    def _read(self) -> bytes:
        """The next line; none if the child ended, or did not answer in time, which ends it."""
        assert self._process.stdout is not None, "opened with a pipe"
        with self._lock:
            self._read_began = monotonic()
            if self._watch is None:  # one thread serves many lines: starting it takes longer than most answers
                self._start_watch(self._timeout_s)
        try:
            return self._process.stdout.readline()
        finally:
            self._read_began = None

    def _ended(self) -> ChildEndedError:
        try:
            code = self._process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:  # it closed its output and goes on
            self._process.kill()
            code = self._process.wait()
        log = self.log()
        if self._timed_out:
            ending = _late(self._timeout_s, is_vendor_limit=self._limits.timeout_s is None)
        else:
            ending = f"{describe_exit(code)}: {log[-1] if log else 'no output'}"
        return ChildEndedError(ending, timed_out=self._timed_out, log=log)

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
            left_s = began + self._timeout_s - monotonic()
            if left_s > 0:
                self._start_watch(left_s)
            else:
                self._timed_out = True
                self._process.kill()


def run_program(command: Sequence[str], *, environment: Mapping[str, str] = _NOTHING) -> ProgramEnd:
    """Run a vendor's program within `vendor_timeout_s`.

    Args:
        command: its absolute path and its arguments.
        environment: variables to set in addition to those of this process.
    """
    limit_s = vendor_timeout_s()
    # Its output goes to a file: a pipe would stay open as long as any process that it started.
    with scratch_folder("program") as folder, (folder / "log").open("w+b") as log:
        with started(
            "program",
            command,
            environment,
            dies_with_thread=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        ) as process:
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
        output = log.read().decode("utf-8", "replace")
    ending = _late(limit_s, is_vendor_limit=True) if code is None else describe_exit(code)
    return ProgramEnd(code == 0, ending, output)


@contextmanager
def started(
    kind: Literal["calls", "program"],
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
        kind: whether it runs functions, or a program.
        command: limits of memory and time in which functions run; or the program and its arguments.
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
    start = ["-m", "edgekv.machine.child_start"] if kind == "calls" else alone
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


def _late(limit_s: float, *, is_vendor_limit: bool) -> str:
    more = f" (set {TIMEOUT_VARIABLE} to allow more)" if is_vendor_limit else ""
    return f"no answer within {limit_s:g} s{more}"
