"""The commands: edgekv's own, and those that installed packages add.

An entry point of the group `edgekv.command_tables` names a sequence of `Entry`. The module that has it is imported at
every start, so it holds nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from importlib import metadata
from pkgutil import resolve_name

import click

from edgekv.errors import EdgeKVError

GROUP = "edgekv.command_tables"

START, RUN, MEASURE, RUNTIMES, DEVICES, KEPT = GROUPS = (
    "Start here",
    "Run",
    "Measure",
    "Other runtimes",
    "Devices",
    "What is kept",
)
"""Headings of the list of commands, in their order."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A command, which is imported when it is run.

    Attributes:
        name: of the command.
        target: of an `edgekv.cli.command.Command` or a `Group` of them, as `module:attribute`.
        help: what it does, in a sentence; the docstring of the command goes on from there.
        extra: of its package, whose packages it needs; empty for none.
        package: the installed package that it belongs to.
        group: its heading in the list of commands; one of `GROUPS`, or another one, which comes behind them.
    """

    name: str
    target: str
    help: str
    extra: str = ""
    package: str = "edgekv"
    group: str = "Commands of other packages"

    def load(self) -> click.Command | None:
        """Import the command. One that cannot be imported is named in a warning, and None.

        Raises:
            MissingExtraError: packages that it needs are not installed; before anything is imported.
        """
        check_extra(f"command {self.name}", self.package, self.extra)
        try:
            command = resolve_name(self.target)
        except Exception as error:  # importing a foreign module may raise anything
            _warn(self.name, self.target, f"{type(error).__name__}: {error}")
            return None
        if not isinstance(command, click.Command):
            _warn(self.name, self.target, f"it is a {type(command).__name__}, no command")
            return None
        command = copy(command)
        command.help = "\n\n".join(filter(None, (self.help, command.help)))
        return command


OWN = (
    Entry(
        "bench",
        "edgekv.cli.bench:bench",
        "Measure prefill and decode speed, time to first token, and verify passes.",
        group=MEASURE,
    ),
    Entry("cache", "edgekv.cli.cache:cache", "Show the size of the cache folder, or clear it.", group=KEPT),
    Entry("chat", "edgekv.cli.chat:chat", "Talk to a model.", group=START),
    Entry(
        "devices",
        "edgekv.cli.devices:devices",
        "List the chips that can be exported for, and products with them.",
        group=DEVICES,
    ),
    Entry("doctor", "edgekv.cli.doctor:doctor", "Try every engine and runtime, each in its own process.", group=START),
    Entry("embed", "edgekv.cli.embed:embed", "Print the embeddings of texts.", group=RUN),
    Entry("generate", "edgekv.cli.generate:generate", "Continue a prompt.", group=RUN),
    Entry(
        "info",
        "edgekv.cli.info:info",
        "Show what a bundle is: model, recipe, graphs, chips, checks, and bytes.",
        group=RUN,
    ),
    Entry(
        "plan",
        "edgekv.cli.plan:plan",
        "Plan an export: memory, parts, speed on the device, cost of the export.",
        group=START,
    ),
    Entry("prefix", "edgekv.cli.prefix:prefix", "Bake, list and remove cached prefixes.", group=KEPT),
    Entry("rerank", "edgekv.cli.rerank:rerank", "Rank documents by their relevance to a query.", group=RUN),
    Entry("serve", "edgekv.serve.command:serve", "Serve a bundle with OpenAI's API.", group=RUN),
    Entry(
        "size",
        "edgekv.cli.size:size",
        "Size a KV cache: memory and copies of each update strategy, and what fits.",
        group=MEASURE,
    ),
    Entry(
        "tokenize",
        "edgekv.cli.tokenize:tokenize",
        "Print the tokens of a text, as `edgekv generate` runs them.",
        group=RUN,
    ),
)


class MissingExtraError(EdgeKVError):
    """A command needs packages that are not installed."""


def check_extra(field: str, package: str, extra: str) -> None:
    """Refuse a command or an option whose packages are not installed.

    Raises:
        MissingExtraError: an extra of a package is not installed.
    """
    if not extra:
        return
    from edgekv.cli.extras import missing_packages  # slow to import

    if missing := missing_packages(package, extra):
        raise MissingExtraError(
            field,
            got=f"no {', '.join(missing)}",
            expected=f"the packages of {package}[{extra}]",
            fix=f'Run pip install "{package}[{extra}]".',
        )


def find_commands() -> dict[str, Entry]:
    """The commands by name. None is imported, and one whose name is taken is left out with a warning."""
    entries = {entry.name: entry for entry in OWN}
    for entry in _installed():
        if entries.setdefault(entry.name, entry).target != entry.target:
            _warn(entry.name, entry.target, "the name is taken")
    return dict(sorted(entries.items()))


def _installed() -> Iterator[Entry]:
    for point in metadata.entry_points(group=GROUP):
        try:
            yield from point.load()
        except Exception as error:  # importing a foreign module may raise anything
            reason = f"{type(error).__name__}: {error}"
            click.echo(f"edgekv: warning: commands of {point.name} ({point.value}) are left out: {reason}", err=True)


def _warn(name: str, target: str, reason: str) -> None:
    """Say which command is left out."""
    click.echo(f"edgekv: warning: the command {name} ({target}) is left out: {reason}", err=True)
