"""The command line program."""

from __future__ import annotations

import contextvars
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from edgekv.cli.commands import Command, find_commands, load_command
from edgekv.cli.exit_codes import exit_code_of, signals_as_exceptions
from edgekv.cli.help_text import help_of
from edgekv.cli.rehash import with_rehash

_COMPLETION = "_EDGEKV_COMPLETE"  # set by shells that complete a command line


def main() -> NoReturn:
    """The entry point of the program: run the arguments of the process and exit."""
    code = 0

    def call() -> None:
        nonlocal code
        with signals_as_exceptions():
            code = run(sys.argv[1:])

    sys.exit(exit_code_of(call) or code)  # also of a signal before or after the command


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; see `exit_code_of`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode still shows the rest

    def call() -> None:
        make_app(arguments)(args=list(arguments), prog_name="edgekv")

    # Process-wide settings of an option end with this call.
    return contextvars.copy_context().run(exit_code_of, call)


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """The program with all commands, sorted by name. Only the one that the arguments mean is imported.

    Raises:
        MissingExtraError: that command needs packages that are not installed.
    """
    app = typer.Typer(
        cls=_ByName,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help="Language models on mobile NPUs: export, check, run.",
    )
    app.callback()(_options)
    commands = find_commands()
    meant = next((each for each in arguments if each in commands), None)
    for name, point in commands.items():
        listed = None if name == meant or _COMPLETION in os.environ else help_of(point)
        if listed is not None:
            app.command(name, help=listed)(_listed)
        elif (command := load_command(point)) is not None:
            _add(app, name, command)
    return app


def _add(app: typer.Typer, name: str, command: Command) -> None:
    if isinstance(command, typer.Typer):
        for each in command.registered_commands:
            each.callback = each.callback and with_rehash(each.callback)
        app.add_typer(command, name=name)
    else:
        app.command(name)(with_rehash(command))


def _listed() -> None:
    """Stands for a command that is only listed; the one that is meant has been imported."""


class _ByName(TyperGroup):
    """Lists commands and groups of commands together, by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgekv {metadata.version('edgekv')}")
        raise typer.Exit


def _options(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Defaults of options: a TOML file with a table for each command, such as [generate].",
            show_default=False,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if config is not None:
        from edgekv.cli.config_file import read_defaults

        ctx.default_map = read_defaults(config, ctx)
