"""The errors a user can meet: each says what, what was found, what is wanted and the way out."""

from __future__ import annotations


class EdgeKVError(Exception):
    """Something that the user can mend. The command line prints it without a traceback and exits with 1.

    Args:
        field: what is wrong: a file, an option, a tensor, a field of a configuration.
        found: the value that was met.
        wanted: what would have been accepted.
        way_out: what to do next.
    """

    exit_code = 1

    def __init__(self, field: str, *, found: object, wanted: object, way_out: str) -> None:
        super().__init__(f"{field}: found {found}; wanted {wanted}. {way_out}")
        self.field = field
        self.found = found
        self.wanted = wanted
        self.way_out = way_out


class UsageError(EdgeKVError):
    """An option or argument that no file could make right. The command line exits with 2."""

    exit_code = 2


class CheckpointError(EdgeKVError):
    """A checkpoint that cannot be read or is not supported."""


class BundleError(EdgeKVError):
    """A bundle that is incomplete, changed, or of another format version."""


class ContextFullError(EdgeKVError):
    """The context has no room for the tokens asked for."""


class MemoryBudgetError(EdgeKVError):
    """The caches of all sequences would hold more memory than they may."""


class EngineError(EdgeKVError):
    """A runtime that is missing, failed, or refused a graph."""


class ServiceError(EdgeKVError):
    """A remote service that refused, failed, or could not be reached."""
