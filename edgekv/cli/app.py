"""The command line program."""

from __future__ import annotations

import contextvars
import os
import sys
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from edgekv.cli.commands import GROUPS, Entry, find_commands
from edgekv.cli.config_file import read_defaults
from edgekv.cli.exit_codes import exit_code_of, signals_as_exceptions
from edgekv.errors import EdgeKVWarning, UsageError

_NAME = "edgekv"
_WIDTH = 100
_ELSEWHERE = {
    "list": "Bundles are folders of your own: edgekv info BUNDLE says what one is.",
    "ls": "Bundles are folders of your own: edgekv info BUNDLE says what one is.",
    "pull": "edgekv export org/model -o BUNDLE downloads a checkpoint and makes a bundle of it.",
    "download": "edgekv export org/model -o BUNDLE downloads a checkpoint and makes a bundle of it.",
    "convert": "edgekv export CHECKPOINT -o BUNDLE converts a checkpoint.",
    "quantize": "edgekv export CHECKPOINT -o BUNDLE --recipe RECIPE quantizes a checkpoint.",
    "create": "edgekv export CHECKPOINT -o BUNDLE makes a bundle.",
    "rm": "Bundles are folders of your own: remove the folder.",
    "show": "edgekv info BUNDLE says what a bundle is.",
    "ps": "edgekv serve shows /health and /metrics of what runs.",
    "complete": "edgekv generate BUNDLE PROMPT continues a prompt.",
    "perplexity": "edgekv eval BUNDLE --text FILE measures it.",
    "server": "edgekv serve BUNDLE serves a bundle.",
    "version": "edgekv --version says it.",
    "help": "edgekv --help lists the commands.",
}
"""Commands of other programs, and what to do here."""
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
    if _COMPLETION in os.environ:
        return exit_code_of(lambda: program(prog_name=_NAME))
    # Process-wide settings of an option end with this call.
    return contextvars.copy_context().run(exit_code_of, lambda: _invoke(arguments))


def _invoke(arguments: Sequence[str]) -> None:
    show, warnings.showwarning = warnings.showwarning, _show_warning
    try:
        with program.make_context(_NAME, list(arguments), max_content_width=_WIDTH) as ctx:
            program.invoke(ctx)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    finally:
        warnings.showwarning = show


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    if issubclass(category, EdgeKVWarning):
        click.echo(f"{_NAME}: warning: {message}", err=True)
    else:
        click.echo(warnings.formatwarning(message, category, filename, lineno), err=True, nl=False)


class _Program(click.Group):
    """The commands by name. Only the one that runs is imported."""

    @cached_property
    def entries(self) -> dict[str, Entry]:
        return find_commands()

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.entries]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self.entries[cmd_name].load() if cmd_name in self.entries else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.entries and not name.startswith("-"):
            near = get_close_matches(name, self.entries, 3)
            said = _ELSEWHERE.get(name) or (f"Did you mean {' or '.join(near)}?" if near else "See edgekv --help.")
            raise UsageError("command", got=repr(name), expected="one of edgekv --help", fix=said)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in GROUPS}
        for name, entry in self.entries.items():
            groups.setdefault(entry.group, []).append((name, entry.help))
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        matching = [entry for entry in self.entries.values() if entry.name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(entry.name, help=entry.help) for entry in matching), *options]


def _print_version(ctx: click.Context, option: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not ctx.resilient_parsing:
        click.echo(f"{_NAME} {metadata.version(_NAME)}")
        ctx.exit()


@click.group(cls=_Program, help="Language models on mobile NPUs: export, check, run.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Defaults of options: a TOML file with a table for each command, such as [generate].",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
@click.pass_context
def program(ctx: click.Context, config: Path | None) -> None:
    if config is not None:
        ctx.default_map = read_defaults(config, ctx)
