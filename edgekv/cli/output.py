"""The output of `--json`: one object whose first field is the version of its layout."""

from __future__ import annotations

from typing import Any

import msgspec
import typer

SCHEMA = 1
"""Incremented when a field is changed or removed, not when one is added."""


def print_json(value: Any, *, list_name: str = "items") -> None:
    """Print a struct, a dataclass or a dict as one JSON object with the field `schema` in front.

    Args:
        value: what to print.
        list_name: field name for a list.
    """
    built = msgspec.to_builtins(value)
    content = built if isinstance(built, dict) else {list_name: built}
    typer.echo(msgspec.json.encode({"schema": SCHEMA, **content}))
