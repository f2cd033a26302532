"""Errors shown to users. Each names the field, the value found, the value expected and the fix."""

from __future__ import annotations

from typing import NoReturn


class EdgeKVError(Exception):
    """An error that the user can fix. The command line prints it without a traceback and exits with 1.

    Args:
        field: what is wrong: a file, an option, a tensor, a field of a configuration.
        got: the value found.
        expected: what is accepted.
        fix: what to do next.
    """

    exit_code = 1

    def __init__(self, field: str, *, got: object, expected: object, fix: str) -> None:
        super().__init__(f"{field}: got {got}; expected {expected}. {fix}")
        self.field = field
        self.got = got
        self.expected = expected
        self.fix = fix

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled as text, so that errors of other processes arrive whole."""
        return _rebuild, (type(self), self.field, str(self.got), str(self.expected), self.fix)


class EdgeKVWarning(UserWarning):
    """What the user should know. The command line prints it without its place in the code."""


class UsageError(EdgeKVError):
    """An invalid option or argument. The command line exits with 2."""

    exit_code = 2


class PrefixError(UsageError, ValueError):
    """An invalid setting or argument of the prefix store."""


class CheckpointError(EdgeKVError):
    """A checkpoint that cannot be read or is not supported."""


class BundleError(EdgeKVError):
    """A bundle that is incomplete, changed, or of another format version."""


class MissingBundleError(BundleError, FileNotFoundError):
    """There is no bundle at a path; also a FileNotFoundError."""


class ContextFullError(EdgeKVError):
    """The context has no room for the requested tokens."""


class MemoryBudgetError(EdgeKVError):
    """The caches of all sequences would exceed the memory budget."""


class BusyError(EdgeKVError):
    """Something of which there is a limited number is in use; the same call may succeed later."""


class EngineError(EdgeKVError):
    """A runtime that is missing, failed, or refused a graph."""


class ServiceError(EdgeKVError):
    """A remote service that refused, failed, or could not be reached."""


def _rebuild(kind: type[EdgeKVError], field: str, got: str, expected: str, fix: str) -> EdgeKVError:
    return kind(field, got=got, expected=expected, fix=fix)


_MAX_DIGITS = 40


def shown(value: object) -> str:
    """A value for a message. Python refuses to write integers of more than some thousand digits."""
    if isinstance(value, int) and value.bit_length() > 4 * _MAX_DIGITS:
        return f"a number of {value.bit_length()} bits"
    return str(value)


def refuse(field: str, got: object, expected: str, fix: str) -> NoReturn:
    """Raise the UsageError of a value that a caller gave."""
    raise UsageError(field, got=shown(got), expected=expected, fix=fix)
