"""Defaults of options from a file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from edgekv.errors import UsageError
from edgekv.system import MIB, read_file

_MOST_BYTES = MIB
_FIX = "Correct the file, or leave --config out."


def read_defaults(file: Path, ctx: typer.Context) -> dict[str, Any]:
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
    assert isinstance(ctx.command, TyperGroup)
    return _defaults(field, found, ctx.command, ctx, ctx.invoked_subcommand)


def _defaults(
    field: str, tables: Mapping[str, Any], group: TyperGroup, ctx: typer.Context, invoked: str | None
) -> dict[str, Any]:
    """The defaults for the commands of a group."""
    defaults = {}
    for name, table in tables.items():
        command = group.get_command(ctx, name)
        if command is None:
            _refuse(field, name, "a command", group.list_commands(ctx))
        if not isinstance(table, dict):
            raise UsageError(f"{field}: {name}", got=repr(table), expected=f"a table, [{name}]", fix=_FIX)
        if isinstance(command, TyperGroup):
            defaults[name] = _defaults(f"{field}: {name}", table, command, ctx, None)
            continue
        given = {key.replace("-", "_"): value for key, value in table.items()}
        if invoked in (name, None):
            names = {each.name: f"--{each.name.replace('_', '-')}" for each in command.params if each.name}
            by_option = {flag.lstrip("-").replace("-", "_"): each.name for each in command.params for flag in each.opts}
            for key in given:
                if key not in names and key not in by_option:
                    _refuse(f"{field}: {name}", key.replace("_", "-"), "an option", list(names.values()))
            given = {by_option.get(key) or key: value for key, value in given.items()}
        defaults[name] = given
    return defaults


def _refuse(field: str, name: str, wanted: str, known: Iterable[str]) -> NoReturn:
    near = get_close_matches(name, [each.lstrip("-") for each in known], 1)
    fix = f"Did you mean {near[0]}? {_FIX}" if near else _FIX
    raise UsageError(f"{field}: {name}", got=f"no name of {wanted}", expected=f"{wanted} of this program", fix=fix)
