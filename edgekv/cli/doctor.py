"""`edgekv doctor`: what works on this machine, and how to install the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click
import msgspec
from rich.console import Console
from rich.table import Table

from edgekv.cli.cache import CacheReport, read_cache
from edgekv.cli.command import command
from edgekv.cli.output import Output, print_json
from edgekv.cli.waiting import waiting
from edgekv.doctor import Examination, Package, examine
from edgekv.machine.system import format_bytes

_SHOWN_DEVICES = 5


@command
def doctor(output: Output) -> None:
    """The exit code is 0 if bundles run on the CPU. API tokens are never printed."""
    with waiting(output, lambda: "trying every engine and runtime"):
        examined = examine()
    cache = read_cache()
    if output.as_json:
        print_json({**msgspec.to_builtins(examined), "cache": cache})
    else:
        _show(examined, cache)
    if not examined.core_works:
        raise click.exceptions.Exit(1)


def _show(examined: Examination, cache: CacheReport) -> None:
    console = Console(markup=False, highlight=False)
    for line in _verdict(examined):
        console.print(line, soft_wrap=True)
    memory = "" if examined.memory_bytes is None else f", {format_bytes(examined.memory_bytes)} of RAM"
    console.print(
        f"edgekv {examined.edgekv}, Python {examined.python}, {examined.machine}, {examined.cores} cores{memory}",
        soft_wrap=True,
    )
    about = "edgekv cache shows and clears it"
    console.print(f"cache {cache.folder}: {format_bytes(cache.bytes)}; {about}", end="\n\n", soft_wrap=True)
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
    by_name: dict[str, list[Package]] = {}
    for package in examined.packages:
        by_name.setdefault(package.name, []).append(package)
    for asked in by_name.values():
        packages.add_row(*_row(asked))
    console.print(packages)


def _verdict(examined: Examination) -> Iterator[str]:
    """What works, and what does not, in a sentence each."""
    works = [finding.name for finding in examined.findings if finding.status == "works"]
    verdict = "Bundles run on this machine" if examined.core_works else "Bundles do not run on this machine"
    yield f"{verdict}. Works: {', '.join(works) or 'nothing'}."
    others = [f"{finding.name} ({finding.status})" for finding in examined.findings if finding.status != "works"]
    if others:
        yield f"Does not work: {', '.join(others)}."


def _row(asked: Sequence[Package]) -> tuple[str, str, str, str]:
    """A package once, with the extras that ask for it; `all` is those together."""
    extras = [check.extra for check in asked if check.extra not in (None, "all")]
    expected = dict.fromkeys(check.expected or "any" for check in asked if not check.fits)
    wrong = f"expected {' and '.join(expected)}" if expected else ""
    shown = "" if any(check.extra is None for check in asked) else f"edgekv[{','.join(extras or ['all'])}]"
    return asked[0].name, asked[0].installed or "-", shown, wrong
