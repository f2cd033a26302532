"""The messages between a process and its child, and the child's side of them; see `child`.

A line of the child's standard input is JSON, [FUNCTION, JOB]; each line of its answer is a `Message`.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec

from edgekv import errors

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
    return {each.__name__: each for each in types if issubclass(each, Exception) and each.__module__ in homes}


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
        name, job = msgspec.json.decode(line, type=tuple[str, msgspec.Raw])
        if not _ON_WINDOWS:
            signal.setitimer(signal.ITIMER_REAL, timeout_s + 1)
        module, _, attribute = name.partition(":")
        function = getattr(import_module(module), attribute)
        types = codecs(function)
        try:
            given = [msgspec.json.decode(job, type=types.job)]
            if types.item is not None:
                given.append(lambda item: send(item, is_last=False))
            send(function(*given))
        except Exception as error:
            _send_error(error, function, send)
        if not _ON_WINDOWS:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _send_error(error: Exception, function: Callable[..., Any], send: Callable[..., None]) -> None:
    name = type(error).__name__
    if isinstance(error, errors.EdgeKVError):
        kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in error_types(function))
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
