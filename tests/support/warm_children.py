"""Child processes of tests that begin with what they would import: a server imports it once, and forks for each.

Starting Python and loading ONNX Runtime with Qualcomm's provider takes as long as compiling a small graph; importing
Pillow takes longer than decoding a picture. A fork is a process of its own all the same: it crashes, hangs, is limited
and is killed alone, and no session was created in it before. Children of programs that tests start begin cold, as those
of users do; so does one with an environment of its own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module, util
from pathlib import Path
from typing import IO, Any, Literal

from edgekv.machine import child, child_start

_ROOT = Path(__file__).parents[2]
_READ_AT_START = ("ADSP", "EDGEKV_QNN", "LD_", "OMP", "OPENBLAS", "PYTHON", "QAIRT", "QNN")
"""What the names of variables begin with that only a new process reads."""
_LIMITED = ("edgekv.spec.template_sandbox", "jinja2.sandbox", "edgekv.pictures.decoder_child", "PIL.Image")
"""Modules of children whose address space is limited: they take a tenth of the least limit."""
_STATUS = struct.Struct("i")
_REQUEST_BYTES = 1 << 16

_cold = child.started


@dataclass(slots=True, eq=False)
class WarmChild:
    """What `subprocess.Popen` has, for a process that the server has forked."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    returncode: int | None = None
    _status: int = -1
    _lock: Any = field(default_factory=threading.Lock)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            end = select.poll()
            end.register(self._status, select.POLLIN)
            if not end.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("a forked child", timeout or 0)
        with self._lock:
            if self.returncode is None:
                ended = os.read(self._status, _STATUS.size)  # nothing if it ended with the server
                self.returncode = os.waitstatus_to_exitcode(_STATUS.unpack(ended)[0]) if ended else -signal.SIGKILL
                os.close(self._status)
        return self.returncode

    def kill(self) -> None:
        with self._lock, suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)


class WarmChildren:
    """Forks children for this process, which is the only one to use them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[str, tuple[socket.socket, subprocess.Popen[bytes]]] = {}
        self._kept = _kept()

    def close(self) -> None:
        """End the servers and all their children."""
        for ours, server in self._servers.values():
            ours.close()
            server.wait()
        self._servers.clear()

    @contextmanager
    def started(
        self,
        kind: Literal["calls", "program"],
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        dies_with_thread: bool,
        stdin: int | IO[bytes],
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
    ) -> Iterator[Any]:
        """As `child.started`."""
        server = "limited" if command[0] != "0" else "htp"
        is_other = not environment.items() <= os.environ.items() or _kept() != self._kept
        if kind != "calls" or is_other or (server == "htp" and not has_htp()):
            streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
            with _cold(kind, command, environment, dies_with_thread=dies_with_thread, **streams) as process:
                yield process
            return
        assert stdin == stdout == subprocess.PIPE and not isinstance(stderr, int), "as `Child` starts it"
        forked = self._fork(server, command, stderr)
        child._running.add(forked)  # type: ignore[arg-type]
        try:
            yield forked
        finally:
            if forked.poll() is None:
                forked.kill()
            forked.wait()
            child._running.discard(forked)  # type: ignore[arg-type]

    def _fork(self, server: str, command: Sequence[str], stderr: IO[bytes]) -> WarmChild:
        (its_input, stdin), (stdout, its_output), (status, its_status) = os.pipe(), os.pipe(), os.pipe()
        request = {"command": command, "environment": dict(os.environ), "folder": str(Path.cwd())}
        request["cores"] = sorted(os.sched_getaffinity(0))
        given = [its_input, its_output, stderr.fileno(), its_status]
        with self._lock:
            if server not in self._servers:
                self._servers[server] = self._serve(server)
            socket.send_fds(self._servers[server][0], [json.dumps(request).encode()], given)
        for descriptor in (its_input, its_output, its_status):
            os.close(descriptor)
        (pid,) = _STATUS.unpack(os.read(status, _STATUS.size))
        return WarmChild(pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), _status=status)

    def _serve(self, server: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, server, str(theirs.fileno())]
            # It ends with our end of the socket, and its children with it: the thread that starts it may end before.
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=_ROOT, stdin=subprocess.DEVNULL)
        return ours, process


def can_fork() -> bool:
    """Whether a server has one thread: on Linux, where BLAS has no others."""
    return sys.platform == "linux" and os.environ.get("OPENBLAS_NUM_THREADS") == "1"


def has_htp() -> bool:
    """Whether Qualcomm's provider is installed, and may be used."""
    return sys.modules.get("onnxruntime_qnn", ...) is not None and util.find_spec("onnxruntime_qnn") is not None


def _kept() -> tuple[object, ...]:
    """What a fork cannot be given."""
    import resource

    variables = sorted((name, text) for name, text in os.environ.items() if name.startswith(_READ_AT_START))
    return *variables, resource.getrlimit(resource.RLIMIT_FSIZE)


# The server


def _main(kind: str, descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if kind == "limited":
        for module in _LIMITED:
            with suppress(ImportError):
                import_module(module)
    else:
        from edgekv.qnn import provider, worker  # noqa: F401 - what children import

        provider._provider()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has this thread alone"  # noqa: PTH208
    awake, waker = os.pipe()
    for end in (awake, waker):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker)
    requests, running = socket.socket(fileno=descriptor), dict[int, int]()
    while True:
        ready, _, _ = select.select([requests, awake], [], [])
        if awake in ready:
            os.read(awake, _REQUEST_BYTES)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = running.pop(ended[0])
                with suppress(BrokenPipeError):
                    os.write(status, _STATUS.pack(ended[1]))
                os.close(status)
        if requests in ready:
            message, given, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 4)
            if not message:
                return
            pid = os.fork()
            if pid == 0:
                for inherited in (descriptor, awake, waker, *running.values()):
                    os.close(inherited)
                _run(json.loads(message), given)
            running[pid] = given[3]
            os.write(given[3], _STATUS.pack(pid))
            for passed in given[:3]:
                os.close(passed)


def _run(request: dict[str, Any], given: Sequence[int]) -> None:
    """The forked process."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        child_start.die_with(os.getppid())
        for number, descriptor in enumerate(given[:3]):
            os.dup2(descriptor, number)
        for descriptor in given:
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        os.sched_setaffinity(0, request["cores"])
        tempfile.tempdir = None
        child.serve(int(request["command"][0]), float(request["command"][1]))
        code = 0
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
