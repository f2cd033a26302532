"""`edgekv doctor`: what works on this machine, and how to install the rest."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from edgekv.cli.command import command
from edgekv.cli.output import Output, print_json
from edgekv.doctor import Examination, Package, examine

_SHOWN_DEVICES = 5


@command
def doctor(output: Output) -> None:
    """The exit code is 0 if bundles run on the CPU. Tokens of services are never printed."""
    examined = examine()
    if output.as_json:
        print_json(examined)
    else:
        _show(examined)
    if not examined.core_works:
        raise click.exceptions.Exit(1)


def _show(examined: Examination) -> None:
    console = Console(markup=False, highlight=False)
    console.print(f"edgekv {examined.edgekv}, Python {examined.python}, {examined.machine}", end="\n\n")
    tried = Table.grid(padding=(0, 2, 0, 0))
    tried.add_column(no_wrap=True)
    tried.add_column(no_wrap=True)
    tried.add_column(overflow="fold")
    for finding in examined.findings:
        tried.add_row(finding.name, finding.status, finding.detail)
        if finding.devices:
            rest = len(finding.devices) - _SHOWN_DEVICES
            more = f" and {rest} more" if rest > 0 else ""
            tried.add_row("", "", ", ".join(finding.devices[:_SHOWN_DEVICES]) + more)
        if finding.fix:
            tried.add_row("", "", finding.fix)
    console.print(tried)
    console.print()
    packages = Table.grid(padding=(0, 2, 0, 0))
    for package in examined.packages:
        packages.add_row(*_row(package))
    console.print(packages)


def _row(package: Package) -> tuple[str, str, str, str]:
    extra = "" if package.extra is None else f"edgekv[{package.extra}]"
    expected = "" if package.fits else f"expected {package.expected or 'any'}"
    return package.name, package.installed or "-", extra, expected
