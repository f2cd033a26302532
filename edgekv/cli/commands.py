"""The commands: edgekv's own, and those that installed packages add."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import typer

from edgekv.cli.bench import bench
from edgekv.cli.chat import chat
from edgekv.cli.doctor import doctor
from edgekv.cli.generate import generate
from edgekv.cli.plan import plan
from edgekv.cli.prefix import app as prefix
from edgekv.cli.size import size
from edgekv.cli.tokenize import tokenize

GROUP = "edgekv.commands"

Command = Callable[..., Any] | typer.Typer
"""A function, or a group of commands."""
_OWN: dict[str, Command] = {
    "bench": bench,
    "chat": chat,
    "doctor": doctor,
    "generate": generate,
    "plan": plan,
    "prefix": prefix,
    "size": size,
    "tokenize": tokenize,
}


def find_commands(wanted: str) -> dict[str, Command]:
    """The command of this name, or all commands if there is none. Other commands are not imported.

    An installed command that cannot be imported is named in a warning and left out.
    """
    if wanted in _OWN:
        return dict(_OWN)
    points = list(metadata.entry_points(group=GROUP))
    matching = [point for point in points if point.name == wanted]
    commands = dict(_OWN)
    for point in matching or points:
        if point.name in commands:
            _warn(point, "the name is taken")
            continue
        try:
            commands[point.name] = point.load()
        except Exception as error:  # importing a foreign module may raise anything
            _warn(point, f"{type(error).__name__}: {error}")
    return commands


def _warn(point: metadata.EntryPoint, reason: str) -> None:
    typer.echo(f"edgekv: warning: the command {point.name} ({point.value}) is left out: {reason}", err=True)
