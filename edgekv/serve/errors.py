"""Errors of the API, in OpenAI's JSON form."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable, Sequence

import msgspec

from edgekv.bundle import AdapterError
from edgekv.errors import BusyError, ContextFullError, EdgeKVError, EngineError, MemoryBudgetError, UsageError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


CANCELLED = "cancelled"
"""The code of a request that nobody waits for any more."""
LEFT = 499
"""Its status, which is never sent."""
OUT_OF_FILES = "open files: got as many as the system allows; expected fewer. Raise the limit, such as ulimit -n 4096."


class ErrorRecord(msgspec.Struct, frozen=True):
    """What went wrong; `param` is the field of the request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of an answer that is an error."""

    error: ErrorRecord


class ApiError(Exception):
    """An error of a request, as the client gets it.

    Attributes:
        status: of HTTP.
        retry_after_s: when to try again, in whole seconds; None says nothing.
        allowed: the methods that the path has, if the request had another.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        allowed: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allowed = allowed

    @property
    def body(self) -> ErrorBody:
        """What is sent."""
        plain = "invalid_request_error" if self.status < 500 else "server_error"
        return ErrorBody(ErrorRecord(str(self), _TYPES.get(self.status, plain), self.param, self.code))

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """Those that HTTP wants with it."""
        headers = {b"allow": ", ".join(self.allowed), b"www-authenticate": "Bearer" if self.status == 401 else ""}
        headers[b"retry-after"] = "" if self.retry_after_s is None else str(self.retry_after_s)
        return tuple((name, value.encode()) for name, value in headers.items() if value)

    def renamed(self, name_of: Callable[[str], str | None]) -> ApiError:
        """The same error with the request's name of the field; see `SamplingFields.name_of`."""
        if self.param is None or (param := name_of(self.param)) == self.param:
            return self
        message = str(self)
        if param is not None and message.startswith(f"{self.param}:"):
            message = param + message[len(self.param) :]
        return ApiError(self.status, message, param=param, code=self.code, retry_after_s=self.retry_after_s)


class DisconnectedError(ApiError):
    """The client has gone, or takes nothing any more; there is nobody to answer."""

    def __init__(self) -> None:
        super().__init__(LEFT, "the client has gone.", code=CANCELLED)


def refused(param: str, *, got: object, expected: object, fix: str, code: str = "invalid_value") -> ApiError:
    """A field of the request that is not accepted, in the words of other errors."""
    return ApiError(400, f"{param}: got {got}; expected {expected}. {fix}", param=param, code=code)


def queue_full(waiting: int, after_s: int, answers: int = 1) -> ApiError:
    """There is no room for further work.

    Args:
        waiting: what waits already.
        after_s: when to try again.
        answers: that the request wants.
    """
    problem = "is full" if answers == 1 else f"has no room for {answers} answers"
    message = f"The queue {problem} ({waiting} waiting). Try again in {after_s} s."
    return ApiError(429, message, code="queue_full", retry_after_s=after_s)


def timed_out(limit_s: float) -> ApiError:
    """A request that has not been answered in its time."""
    message = f"request: got {limit_s:g} s without an end; expected less. Ask for fewer tokens."
    return ApiError(504, message, code="timeout")


def stopping() -> ApiError:
    """The server ends."""
    return ApiError(503, "the server is stopping.", code="stopping")


def api_error(error: BaseException) -> ApiError:
    """The error that a client gets. Details of this machine, such as paths, go only to the server's log."""
    if isinstance(error, ApiError):
        return error
    if is_out_of_files(error):
        print(f"edgekv serve: {OUT_OF_FILES}", file=sys.stderr)
        return ApiError(503, "The server has too many open files. Try again later.", code="busy")
    if not isinstance(error, EdgeKVError):
        traceback.print_exception(error, file=sys.stderr)
        return ApiError(500, f"{type(error).__name__}. This is a bug; please report it.", code="internal_error")
    if isinstance(error, ContextFullError):
        fix = "Send less, or serve a bundle that was exported with a larger --context."
        code = "context_length_exceeded"
        return refused(error.field, got=error.got, expected=error.expected, fix=fix, code=code)
    if isinstance(error, UsageError):
        return ApiError(400, str(error), param=error.field, code="invalid_value")
    if isinstance(error, MemoryBudgetError):
        return ApiError(503, str(error), code="out_of_memory")
    if isinstance(error, BusyError):
        return ApiError(503, str(error), code="busy")
    print(f"edgekv serve: {error}", file=sys.stderr)
    if isinstance(error, AdapterError):
        return ApiError(503, str(error), param="model", code="adapter_damaged")
    code = "engine_failed" if isinstance(error, EngineError) else "internal_error"
    return ApiError(500, "The model failed. The server's log says why.", code=code)


def is_out_of_files(error: BaseException | None) -> bool:
    """Whether the process or the system can open no more files, and so take no connections."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
