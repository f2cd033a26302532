"""What a command prints: its result on standard output, all else on standard error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import click
import msgspec

from edgekv.option import Option

SCHEMA = 1
"""Of `--json`. Incremented when a field is changed or removed, not when one is added."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a command prints, and how much."""

    as_json: Annotated[bool, Option("Print one JSON object on standard output.", "--json")] = False
    is_quiet: Annotated[
        bool, Option("Print only results, warnings and errors: no progress, no statistics.", "-q --quiet")
    ] = False

    def note(self, text: str) -> None:
        """Print a line on standard error, unless `--quiet` or `--json` asks for silence."""
        if not (self.is_quiet or self.as_json):
            click.echo(text, err=True)


def print_json(value: Any, *, list_name: str = "items") -> None:
    """Print a struct, a dataclass or a dict as one JSON object with the field `schema` in front.

    Args:
        value: what to print.
        list_name: field name for a list.
    """
    built = msgspec.to_builtins(value)
    content = built if isinstance(built, dict) else {list_name: built}
    click.echo(msgspec.json.encode({"schema": SCHEMA, **content}))
