"""What a command prints: its result on standard output, all else on standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import click
import msgspec

from edgekv.errors import UsageError
from edgekv.machine.steps import LOG
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
    is_verbose: Annotated[bool, Option("Say which steps are done, and how long each takes.", "-v --verbose")] = False

    def __post_init__(self) -> None:
        if self.is_quiet and self.is_verbose:
            raise UsageError("--verbose", got="it with --quiet", expected="one of them", fix="Leave one of them out.")

    def note(self, text: str) -> None:
        """Print a line on standard error, unless `--quiet` or `--json` asks for silence."""
        if not (self.is_quiet or self.as_json):
            click.echo(text, err=True)


@contextmanager
def steps_on_stderr() -> Iterator[None]:
    """Print the steps that the block does."""
    printed = logging.StreamHandler(sys.stderr)
    printed.setFormatter(logging.Formatter("edgekv: %(message)s"))
    before = LOG.level
    LOG.addHandler(printed)
    LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOG.removeHandler(printed)
        LOG.setLevel(before)


def print_json(value: Any, *, list_name: str = "items") -> None:
    """Print a struct, a dataclass or a dict as one JSON object with the field `schema` in front.

    Args:
        value: what to print.
        list_name: field name for a list.
    """
    built = msgspec.to_builtins(value)
    content = built if isinstance(built, dict) else {list_name: built}
    click.echo(msgspec.json.encode({"schema": SCHEMA, **content}))
