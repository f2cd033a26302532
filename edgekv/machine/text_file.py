"""Text files that a user names."""

from __future__ import annotations

from pathlib import Path

from edgekv.errors import UsageError
from edgekv.machine.system import MIB, read_file

_LIMIT_BYTES = 256 * MIB


def read_text_file(path: Path, field: str) -> str:
    """The content of a UTF-8 text file of at most 256 MiB.

    Args:
        path: a regular file.
        field: the option or argument that names it, for the error.

    Raises:
        UsageError: the file cannot be read, is no regular file, is too large, or is not UTF-8.
    """
    try:
        return read_file(path, _LIMIT_BYTES).decode("utf-8")
    except OSError as error:
        problem = str(error.strerror)
    except UnicodeDecodeError as error:
        problem = str(error)
    raise UsageError(field, got=f"{path}: {problem}", expected="a UTF-8 text file", fix="Check the path.")
