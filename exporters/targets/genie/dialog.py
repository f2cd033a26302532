"""Genie on a folder, in a child process: a crash or hang of the library becomes an error."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import msgspec

from edgekv.child import TIMEOUT_VARIABLE, describe_exit, started, vendor_timeout_s
from edgekv.errors import EngineError
from edgekv.vendor_libraries import Platform, search_paths
from exporters.targets.genie.config import GenieConfig
from exporters.targets.genie.messages import (
    Create,
    Done,
    Query,
    Reply,
    Request,
    Reset,
    Restore,
    Save,
    Text,
    TokenQuery,
    Tokens,
)
from exporters.targets.genie.vendor import find_library

_CONTEXT_FULL = 4
_MEANINGS = {_CONTEXT_FULL: "the context is full"}
_WAY_OUT = "A prompt must leave room in the context; else write the folder again with edgekv bundle genie."
_CLOSING_S = 10
_NOISE = ("LIBNATIVE", "affinity mask", '"Using create From Binary"')


class GenieDialog:
    """A conversation with Genie; a context manager. Queries continue the conversation until `reset`."""

    def __init__(self, folder: Path, config: GenieConfig, state: Path | None = None) -> None:
        """Load the binaries that the configuration names.

        Args:
            folder: against which the paths of the configuration are resolved.
            config: as `GenieFolder.config` gives it.
            state: with which every conversation begins, as `GenieFolder.state` gives it; None to begin empty.

        Raises:
            EngineError: Genie is missing, refused the folder, or crashed.
        """
        library = find_library()
        self._timeout_s = vendor_timeout_s()
        self._timed_out = False
        self._state = state
        self._open = ExitStack()
        self._log = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._child = self._open.enter_context(
            started(
                "module",
                ["exporters.targets.genie.worker"],
                search_paths(library.parent, Platform.here()),
                dies_with_thread=threading.current_thread() is threading.main_thread(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
        )
        try:
            self._finish(
                Create(library=str(library), folder=str(folder.absolute()), config=msgspec.json.encode(config).decode())
            )
            self._begin()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GenieDialog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def query(self, text: str, max_new_tokens: int | None = None) -> Iterator[str]:
        """The answer to a text, piece by piece. Genie stops streaming at a byte that is not valid UTF-8.

        Raises:
            EngineError: the text does not fit the context, or Genie failed.
        """
        for reply in self._request(Query(text=text, max_new_tokens=max_new_tokens)):
            if isinstance(reply, Text):
                yield reply.piece

    def token_query(self, tokens: Sequence[int], max_new_tokens: int | None = None) -> Iterator[int]:
        """The tokens that follow these. Genie puts the configuration's `bos-token` in front of the first query.

        Raises:
            EngineError: the tokens do not fit the context, or Genie failed.
        """
        for reply in self._request(TokenQuery(tokens=list(tokens), max_new_tokens=max_new_tokens)):
            if isinstance(reply, Tokens):
                yield from reply.tokens

    def save(self, path: Path) -> None:
        """Write the conversation's state into a folder that exists."""
        self._finish(Save(path=str(path.absolute())))

    def restore(self, path: Path) -> None:
        """Resume from a saved state."""
        self._finish(Restore(path=str(path.absolute())))

    def reset(self) -> None:
        """Start a new conversation."""
        self._finish(Reset())
        self._begin()

    def close(self) -> None:
        """End the child process. A second call does nothing."""
        assert self._child.stdin is not None, "opened with a pipe"
        assert self._child.stdout is not None, "opened with a pipe"
        with self._open:
            with suppress(BrokenPipeError):
                self._child.stdin.close()
            with suppress(subprocess.TimeoutExpired):  # killed then
                self._child.wait(_CLOSING_S)
            self._child.stdout.close()

    def _begin(self) -> None:
        if self._state is not None:
            self.restore(self._state)

    def _finish(self, request: Request) -> None:
        for _ in self._request(request):
            pass

    def _request(self, request: Request) -> Iterator[Reply]:
        assert self._child.stdin is not None, "opened with a pipe"
        call = type(request).__name__
        try:
            self._child.stdin.write(msgspec.json.encode(request) + b"\n")
            self._child.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._failure(call, "a dialog that has ended") from None
        while line := self._next_line():
            reply = msgspec.json.decode(line, type=Reply)
            if not isinstance(reply, Done):
                yield reply
            elif reply.status:
                raise self._failure(reply.call, _MEANINGS.get(reply.status, f"status {reply.status}"))
            else:
                return
        if self._timed_out:
            fix = f"Set {TIMEOUT_VARIABLE} to allow more time."
            raise self._failure(call, f"no answer within {self._timeout_s:g} s", fix)
        crashed = "The emulator on x86 crashes on a binary of several graphs: use genie_config.json there."
        raise self._failure(call, describe_exit(self._child.wait()), crashed)

    def _next_line(self) -> bytes:
        """The next line of the child; none if it ended or did not answer in time, which ends it."""
        assert self._child.stdout is not None, "opened with a pipe"
        watch = threading.Timer(self._timeout_s, self._time_out)
        watch.daemon = True
        watch.start()
        try:
            return self._child.stdout.readline()
        finally:
            watch.cancel()

    def _time_out(self) -> None:
        self._timed_out = True
        self._child.kill()

    def _failure(self, call: str, what: str, fix: str = _WAY_OUT) -> EngineError:
        said = ""
        if not self._log.closed:
            log = self._log.fileno()  # its position is the child's
            lines = os.pread(log, os.fstat(log).st_size, 0).decode("utf-8", "replace").splitlines()
            said = "; ".join(line.strip() for line in lines if line.strip() and not any(n in line for n in _NOISE))
        return EngineError(
            f"Genie: {call}",
            got=f"{what}: {said}" if said else what,
            expected="status 0",
            fix=fix,
        )
