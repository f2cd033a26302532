"""The commands: edgekv's own, and those that installed packages add.

An entry point of the group `edgekv.commands` names a function or a group of commands, and in brackets the extras of its
package that the command needs: `export = "exporters.cli.export:export [export]"`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import typer

from edgekv.cli.extras import missing_packages
from edgekv.errors import EdgeKVError

GROUP = "edgekv.commands"

Command = Callable[..., Any] | typer.Typer
"""A function, or a group of commands."""

_OWN = {
    "bench": "edgekv.cli.bench:bench",
    "chat": "edgekv.cli.chat:chat",
    "devices": "edgekv.cli.devices:devices",
    "doctor": "edgekv.cli.doctor:doctor",
    "generate": "edgekv.cli.generate:generate",
    "info": "edgekv.cli.info:info",
    "plan": "edgekv.cli.plan:plan",
    "prefix": "edgekv.cli.prefix:app",
    "size": "edgekv.cli.size:size",
    "tokenize": "edgekv.cli.tokenize:tokenize",
}


class MissingExtraError(EdgeKVError):
    """A command needs packages that are not installed."""


def find_commands() -> dict[str, metadata.EntryPoint]:
    """The commands by name. None is imported, and one whose name is taken is left out with a warning."""
    found = {name: metadata.EntryPoint(name, value, GROUP) for name, value in _OWN.items()}
    for point in metadata.entry_points(group=GROUP):
        if point.name in found:
            _warn(point, "the name is taken")
        else:
            found[point.name] = point
    return found


def load_command(point: metadata.EntryPoint) -> Command | None:
    """Import a command. One that cannot be imported is named in a warning, and None.

    Raises:
        MissingExtraError: packages that it needs are not installed; before anything is imported.
    """
    package = point.dist.name if point.dist is not None else "edgekv"
    for extra in point.extras:
        if missing := missing_packages(package, extra):
            raise MissingExtraError(
                f"command {point.name}",
                got=f"no {', '.join(missing)}",
                expected=f"the packages of {package}[{extra}]",
                fix=f'Run pip install "{package}[{extra}]".',
            )
    try:
        command: Command = point.load()
    except Exception as error:  # importing a foreign module may raise anything
        _warn(point, f"{type(error).__name__}: {error}")
        return None
    return command


def _warn(point: metadata.EntryPoint, reason: str) -> None:
    typer.echo(f"edgekv: warning: the command {point.name} ({point.value}) is left out: {reason}", err=True)
