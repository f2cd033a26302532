"""Defaults of options from a file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import click

from edgekv.cli.command import takes_lists
from edgekv.errors import UsageError
from edgekv.machine.system import MIB, read_file

_MAX_BYTES = MIB
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
        content = tomllib.loads(read_file(file, _MAX_BYTES).decode())
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(field, got=reason, expected="a TOML file of at most 1 MiB", fix=_FIX) from None
    except ValueError as error:  # no UTF-8, or no TOML
        raise UsageError(field, got=str(error), expected="TOML", fix=_FIX) from None
    assert isinstance(ctx.command, click.Group)
    return _defaults(field, content, ctx.command, ctx, ctx.invoked_subcommand)


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
    options = {
        flag.lstrip("-"): parameter
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for flag in parameter.opts
    }
    defaults = {}
    for key, value in table.items():
        if key not in options:
            _refuse(field, key, "an option", list(options))
        option = options[key]
        default = _value(f"{field}: {key}", value, option, click.Context(command))
        if default is not False or option.secondary_opts:  # a flag that is not given
            defaults[str(option.name)] = default
    return defaults


def _value(field: str, value: Any, option: click.Option, ctx: click.Context) -> Any:
    """A value as the command line would have it: a text, several of them, or whether a flag is given.

    Raises:
        UsageError: it is of another type, or the command line would refuse it.
    """
    if option.is_flag:
        if not isinstance(value, bool):
            raise UsageError(field, got=repr(value), expected="true or false", fix=_FIX)
        return value
    if isinstance(value, list) and (option.multiple or takes_lists(option.type)):
        texts = [_text(field, member, option, ctx) for member in value]
        return texts if option.multiple else _checked(field, ",".join(texts), value, option, ctx)
    text = _text(field, value, option, ctx)
    return [text] if option.multiple else text


def _text(field: str, value: Any, option: click.Option, ctx: click.Context) -> str:
    """A value that is not a list, as a word of the command line."""
    is_text = isinstance(option.type, (click.types.StringParamType, click.Path))
    types: Sequence[type] = (str,) if is_text else (str, int, float)
    if isinstance(value, bool) or not isinstance(value, (*types,)):
        raise UsageError(field, got=repr(value), expected=_accepted(option), fix=_FIX)
    return _checked(field, str(value), value, option, ctx)


def _checked(field: str, text: str, value: Any, option: click.Option, ctx: click.Context) -> str:
    """A word that the command line takes for the option."""
    try:
        option.type.convert(text, option, ctx)
    except click.UsageError:
        raise UsageError(field, got=repr(value), expected=_accepted(option), fix=_FIX) from None
    except UsageError as error:  # of the option's own parser
        raise UsageError(field, got=error.got, expected=error.expected, fix=error.fix) from None
    return text


def _accepted(option: click.Option) -> str:
    """The values of an option, in words."""
    kind = option.type
    if isinstance(kind, (click.types.IntParamType, click.types.FloatParamType)):
        words = "a whole number" if isinstance(kind, click.types.IntParamType) else "a number"
        minimum = getattr(kind, "min", None)
        return words if minimum is None else f"{words}, at least {minimum:g}"
    if isinstance(kind, click.Choice):
        return " or ".join(map(str, kind.choices))
    words = "a path" if isinstance(kind, click.Path) else "a text"
    return f"{words}, or a list of them" if option.multiple or takes_lists(kind) else words


def _refuse(field: str, name: str, expected: str, known: Iterable[str]) -> NoReturn:
    near = get_close_matches(name, list(known), 1)
    fix = f"Did you mean {near[0]}? {_FIX}" if near else _FIX
    raise UsageError(f"{field}: {name}", got=f"no name of {expected}", expected=f"{expected} of this program", fix=fix)
