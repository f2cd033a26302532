"""Output of native libraries: kept off the terminal, and available for error messages."""

from __future__ import annotations

import ctypes
import io
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Literal

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# 2025-01-31 12:00:00.0 [W:onnxruntime:, file.cc:12 Function] message
_ORT_LINE = re.compile(r"^\S+ \S+ \[([VIWEF]):[^\]]*\] (.*)$")
_lock = threading.RLock()

_StreamName = Literal["stdout", "stderr"]
_DESCRIPTORS: dict[_StreamName, int] = {"stdout": 1, "stderr": 2}


class NativeOutput:
    """The captured output, once the capture has ended."""

    def __init__(self) -> None:
        self.text = ""

    def complaints(self) -> list[str]:
        """The messages that ONNX Runtime logged as warnings or errors, in order, without duplicates."""
        matches = (_ORT_LINE.match(_COLOUR.sub("", line)) for line in self.text.splitlines())
        return list(dict.fromkeys(match[2].strip() for match in matches if match and match[1] in "WEF"))


@contextmanager
def captured_output() -> Iterator[NativeOutput]:
    """Capture what native code writes to file descriptors 1 and 2; `sys.stdout` and `sys.stderr` stay connected.

    Qualcomm's libraries print to both, and a line on standard output would corrupt the output of `--json`. The
    descriptors belong to the whole process, so only one capture runs at a time.
    """
    captured = NativeOutput()
    with _lock, tempfile.TemporaryFile() as file:
        with ExitStack() as stack:
            for name, descriptor in _DESCRIPTORS.items():
                stack.enter_context(_redirected(name, descriptor, file.fileno()))
            yield captured
        file.seek(0)
        captured.text = file.read().decode("utf-8", "replace")


@contextmanager
def _redirected(name: _StreamName, descriptor: int, target: int) -> Iterator[None]:
    try:
        saved = os.dup(descriptor)
    except OSError:  # the process has no such descriptor
        yield
        return
    stream = getattr(sys, name)
    stand_in = _stand_in(stream, descriptor, saved)
    _flush_c_streams()
    os.dup2(target, descriptor)
    if stand_in is not None:
        setattr(sys, name, stand_in)
    try:
        yield
    finally:
        _flush_c_streams()
        os.dup2(saved, descriptor)
        if stand_in is not None:
            stand_in.flush()
            setattr(sys, name, stream)
        os.close(saved)


def _stand_in(stream: object, descriptor: int, saved: int) -> io.TextIOWrapper | None:
    """A stream that still reaches the terminal; None if the given one does not use the descriptor."""
    with suppress(AttributeError, OSError, ValueError):
        if isinstance(stream, io.TextIOWrapper) and stream.fileno() == descriptor:
            stream.flush()
            raw = io.BufferedWriter(io.FileIO(saved, "w", closefd=False))
            return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)
    return None


def _flush_c_streams() -> None:
    if os.name == "nt":
        return  # other modules' C library is not accessible; their buffered output is printed later
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).fflush(None)
