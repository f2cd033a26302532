"""The Android Debug Bridge, as its own client offers it."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgekv.errors import EngineError, UsageError
from edgekv.machine.child import TIMEOUT_VARIABLE, started, vendor_timeout_s

_SDK_VARIABLES = ("ANDROID_HOME", "ANDROID_SDK_ROOT")
_INSTALL = "Install Android's platform tools, and add them to PATH or set ANDROID_HOME."
_CHUNK_BYTES = 1 << 12
_LISTING_S = 30.0  # starting adb's server, and asking it
_STATES = {
    "unauthorized": "Unlock the phone, and allow USB debugging for this computer.",
    "authorizing": "Unlock the phone, and allow USB debugging for this computer.",
    "offline": "Reconnect the cable, or run: adb reconnect",
    "no permissions": "Give your user access to the USB device (udev rules), then run: adb kill-server",
}
_LOST = ("device offline", "no devices/emulators found", "error: closed", "protocol fault", "device still authorizing")


class LostPhoneError(EngineError):
    """The phone is no longer there: it was unplugged, or it restarts."""


@dataclass(frozen=True, slots=True)
class ShellEnd:
    """How a command of the phone's shell ended: its exit code, and what it printed."""

    code: int
    output: str


class Adb:
    """One phone. Paths on it are absolute POSIX paths."""

    def __init__(self, client: str, serial: str) -> None:
        self._client = client
        self.serial = serial

    @classmethod
    def connect(cls, serial: str | None = None) -> Adb:
        """The phone with this serial number, or the only one.

        Raises:
            EngineError: there is no adb, no such phone, or it does not accept commands.
            UsageError: several phones are connected, and none is named.
        """
        client = _find_client()
        states = _states(_run([client, "devices"], _LISTING_S).output)
        if not states:
            fix = "Connect a phone with USB debugging enabled (Settings, developer options)."
            raise EngineError("adb", got="no device", expected="a phone", fix=fix)
        if serial is None:
            if len(states) > 1:
                raise UsageError("--serial", got="none", expected=f"one of {', '.join(states)}", fix="Name the phone.")
            serial = next(iter(states))
        if serial not in states:
            raise EngineError("--serial", got=serial, expected=f"one of {', '.join(states)}", fix="Name one of these.")
        if (state := states[serial]) != "device":
            fix = next((fix for known, fix in _STATES.items() if state.startswith(known)), "Start Android on it.")
            raise EngineError(f"adb: {serial}", got=state, expected="a device that accepts commands", fix=fix)
        return cls(client, serial)

    def shell(self, command: str) -> ShellEnd:
        """Run a command in the phone's shell.

        Raises:
            EngineError: the phone was lost, or did not answer within the vendor's time limit.
        """
        end = _run(self._command("shell", command))
        self.check_alive(end.code, end.output)
        return end

    def read(self, command: str, what: str) -> str:
        """The output of a command that must succeed; `what` it is for, in the error.

        Raises:
            EngineError: it failed, or the phone was lost.
        """
        end = self.shell(command)
        if end.code != 0:
            raise EngineError(what, got=_last_line(end.output), expected="success", fix=f"On the phone: {command}")
        return end.output

    @contextmanager
    def stream(self, command: str) -> Iterator[ShellProcess]:
        """A command of the phone's shell whose output is read while it runs."""
        with started(
            "program",
            self._command("shell", command),
            {},
            dies_with_thread=threading.current_thread() is threading.main_thread(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as child:
            yield ShellProcess(child, vendor_timeout_s())

    def push(self, local: Path, remote: str) -> None:
        """Copy a file to the phone, or a folder whose name there is new.

        Raises:
            EngineError: there is no room or no permission there, or the phone was lost.
        """
        self._copy(["push", str(local), remote], remote)

    def pull(self, remote: str, local: Path) -> None:
        """Copy a file or folder from the phone.

        Raises:
            EngineError: it is not there, or the phone was lost.
        """
        self._copy(["pull", remote, str(local)], remote)

    def check_alive(self, code: int, output: str) -> None:
        """Raise if this is how adb says that the phone is no longer there.

        Raises:
            LostPhoneError: it was lost.
        """
        if code != 0 and any(sign in output for sign in (*_LOST, f"device '{self.serial}' not found")):
            fix = "Reconnect it and run the command again; files that were copied are kept."
            raise LostPhoneError(f"adb: {self.serial}", got=_last_line(output), expected="a connected phone", fix=fix)

    def _copy(self, arguments: Sequence[str], remote: str) -> None:
        end = _run(self._command(*arguments))
        if end.code == 0:
            return
        self.check_alive(end.code, end.output)
        said = _last_line(end.output)
        if "No space left" in said:
            raise EngineError(remote, got="no space left", expected="room for the file", fix="Free some, and repeat.")
        if "Permission denied" in said or "Read-only" in said:
            fix = "Choose a folder that adb may write, such as --to /data/local/tmp/edgekv."
            raise EngineError(remote, got=said, expected="a folder that adb may write", fix=fix)
        raise EngineError(remote, got=said, expected="a copy", fix=f"Try: adb {shlex.join(arguments)}")

    def _command(self, *arguments: str) -> list[str]:
        return [self._client, "-s", self.serial, *arguments]


class ShellProcess:
    """A running command of the phone's shell."""

    def __init__(self, child: subprocess.Popen[bytes], limit_s: float) -> None:
        self._child = child
        self._limit_s = limit_s
        self._timed_out = False

    def chunks(self) -> Iterator[bytes]:
        """What it prints, as it comes.

        Raises:
            EngineError: it did not end within the vendor's time limit.
        """
        assert self._child.stdout is not None, "opened with a pipe"
        watch = threading.Timer(self._limit_s, self._time_out)
        watch.daemon = True
        watch.start()
        try:
            while chunk := os.read(self._child.stdout.fileno(), _CHUNK_BYTES):
                yield chunk
        finally:
            watch.cancel()
        if self._timed_out:
            fix = f"Set {TIMEOUT_VARIABLE} to allow more time."
            raise EngineError("adb shell", got=f"no end within {self._limit_s:g} s", expected="an answer", fix=fix)

    def code(self) -> int:
        """Its exit code, after the last chunk."""
        return self._child.wait()

    def _time_out(self) -> None:
        self._timed_out = True
        self._child.kill()


def _find_client() -> str:
    folders = [Path(os.environ[name], "platform-tools") for name in _SDK_VARIABLES if os.environ.get(name)]
    for folder in (None, *folders):
        if program := shutil.which("adb", path=None if folder is None else str(folder)):
            return str(Path(program).absolute())
    raise EngineError("adb", got="no program adb", expected="Android's platform tools", fix=_INSTALL)


def _states(listing: str) -> dict[str, str]:
    """The state of each device, from `adb devices`: `SERIAL<tab>STATE`."""
    pairs = (line.split("\t", 1) for line in listing.splitlines() if "\t" in line)
    return {serial.strip(): state.strip() for serial, state in pairs}


def _run(command: Sequence[str], max_s: float = math.inf) -> ShellEnd:
    limit_s = min(max_s, vendor_timeout_s())
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        fix = "Run: adb kill-server."
        if limit_s < max_s:
            fix += f" Or set {TIMEOUT_VARIABLE} to allow more time."
        raise EngineError("adb", got=f"no answer within {limit_s:g} s", expected="an answer", fix=fix) from None
    return ShellEnd(done.returncode, done.stdout.decode("utf-8", "replace"))


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
