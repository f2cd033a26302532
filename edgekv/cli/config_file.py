"""Defaults of options from a file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import click

from edgekv.errors import UsageError
from edgekv.system import MIB, read_file

_MOST_BYTES = MIB
_FIX = "Correct the file, or leave --config out."


def read_defaults(file: Path, ctx: click.Context) -> dict[str, Any]:
    """The defaults that a TOML file sets, as `ctx.default_map` takes them.

    A command has a table with its name, such as `[generate]`; one of a group a table within it, `[prefix.ls]`. Keys are
    the long names of options, without dashes in front. What the command line or the environment says goes first.

    Args:
        file: in TOML.
        ctx: of the program. The command that runs next is checked; the others are not imported.

    Raises:
        UsageError: a file that cannot be read, or a command or an option that there is not.
    """
    field = f"--config {file}"
    try:
        found = tomllib.loads(read_file(file, _MOST_BYTES).decode())
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(field, got=reason, expected="a TOML file of at most 1 MiB", fix=_FIX) from None
    except ValueError as error:  # no UTF-8, or no TOML
        raise UsageError(field, got=str(error), expected="TOML", fix=_FIX) from None
    assert isinstance(ctx.command, click.Group)
    return _defaults(field, found, ctx.command, ctx, ctx.invoked_subcommand)


def _defaults(
    field: str, tables: Mapping[str, Any], group: click.Group, ctx: click.Context, invoked: str | None
) -> dict[str, Any]:
    """The defaults for the commands of a group; of all of them without `invoked`."""
    defaults = {}
    known = group.list_commands(ctx)
    for name, table in tables.items():
        if name not in known:
            _refuse(field, name, "a command", known)
        if not isinstance(table, dict):
            raise UsageError(f"{field}: {name}", got=repr(table), expected=f"a table, [{name}]", fix=_FIX)
        if invoked not in (name, None):
            continue
        command = group.get_command(ctx, name)
        if isinstance(command, click.Group):
            defaults[name] = _defaults(f"{field}: {name}", table, command, ctx, None)
        elif command is not None:
            defaults[name] = _options(f"{field}: {name}", table, command)
    return defaults


def _options(field: str, table: Mapping[str, Any], command: click.Command) -> dict[str, Any]:
    """The defaults of a command."""
    names = {flag.lstrip("-"): each.name for each in command.params for flag in each.opts if each.name}
    for key in table:
        if key not in names:
            _refuse(field, key, "an option", list(names))
    return {names[key]: value for key, value in table.items()}


def _refuse(field: str, name: str, wanted: str, known: Iterable[str]) -> NoReturn:
    near = get_close_matches(name, list(known), 1)
    fix = f"Did you mean {near[0]}? {_FIX}" if near else _FIX
    raise UsageError(f"{field}: {name}", got=f"no name of {wanted}", expected=f"{wanted} of this program", fix=fix)
