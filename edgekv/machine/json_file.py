"""JSON files: read from untrusted ones (huge, endless, deeply nested, or not JSON at all), written for readers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from edgekv.errors import BundleError, EdgeKVError
from edgekv.machine.decoding import DECODERS
from edgekv.machine.system import MIB, read_file

T = TypeVar("T")

_LIMIT_BYTES = 64 * MIB


def read_json(
    path: Path,
    type: type[T],
    *,
    expected: str,
    fix: str,
    error: type[EdgeKVError] = BundleError,
    limit_bytes: int = _LIMIT_BYTES,
) -> T:
    """The content of a JSON file.

    Args:
        path: a regular file.
        type: what it contains; `msgspec` checks the types of all fields.
        expected: expected content of the file, for the error.
        fix: what to do, for the error.
        error: the class of the error.
        limit_bytes: a larger file is refused.

    Raises:
        EdgeKVError: of the class `error`: the file cannot be read, is not JSON, or has other fields or types.
    """
    try:
        raw = read_file(path, limit_bytes)
    except OSError as failure:
        raise error(str(path), got=failure.strerror, expected=expected, fix=fix) from None
    return decode_json(raw, type, field=str(path), expected=expected, fix=fix, error=error)


def decode_json(
    raw: bytes,
    type: type[T],
    *,
    field: str,
    expected: str,
    fix: str,
    error: type[EdgeKVError] = BundleError,
) -> T:
    """The content of JSON text; see `read_json`.

    Raises:
        EdgeKVError: of the class `error`.
    """
    try:
        return DECODERS[type].decode(raw)
    except (
        ValueError,
        RecursionError,
        MemoryError,
        OverflowError,
    ) as failure:  # msgspec's and Unicode's are ValueErrors
        got = "values nested too deeply" if isinstance(failure, RecursionError) else (str(failure) or "too much data")
        raise error(field, got=got, expected=expected, fix=fix) from None


def json_of_lines(content: object) -> bytes:
    """JSON in UTF-8 that stays short: one line for each object or array of plain values, with a final newline."""
    return "".join(_lines(content, "")).encode() + b"\n"


def _lines(content: object, indent: str) -> Iterator[str]:
    items = content if isinstance(content, list) else []
    fields = content.items() if isinstance(content, dict) else [(None, item) for item in items]
    if not any(isinstance(value, dict | list) for _, value in fields):
        yield msgspec.json.encode(content).decode()
        return
    begin, end = "{}" if isinstance(content, dict) else "[]"
    separator, inner = begin, f"{indent} "
    for name, value in fields:
        yield f"{separator}\n{inner}" + ("" if name is None else f"{msgspec.json.encode(name).decode()}: ")
        yield from _lines(value, inner)
        separator = ","
    yield f"\n{indent}{end}"


def readable_json(content: object, *, indent: int = 1) -> bytes:
    """Indented JSON in UTF-8: one field or element per line, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(content), indent=indent) + b"\n"
