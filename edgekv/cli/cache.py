"""`edgekv cache`: what is kept in the user's cache folder, and clearing it."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import click
import msgspec

from edgekv.cli.command import command
from edgekv.cli.output import Output, print_json
from edgekv.errors import UsageError
from edgekv.machine.system import CACHE_VARIABLE, LIMIT_VARIABLE, cache_folder, cache_limit_bytes, format_bytes
from edgekv.option import Option

HISTORY = "chat-history"
_KINDS = {
    "rendered": "graphs for the CPU, with their weights",
    "emulated": "graphs for the mode emulate",
    "pieces": "finished pieces of interrupted exports, for --resume",
    "checkpoints": "checkpoints of URLs",
    "corpora": "indexes of corpora to draft from",
    "tried": "files that were tried in a child process",
    "program": "hashes of this program",
    "hashes.json": "hashes of bundles that were verified",
    HISTORY: "lines typed in edgekv chat",
}
"""What edgekv writes there, by name; other files are left alone."""


class Kept(msgspec.Struct, frozen=True):
    """A file or folder of the cache."""

    name: str
    about: str
    bytes: int


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache folder holds.

    Attributes:
        folder: its path.
        bytes: of all that is listed.
        limit_bytes: of graphs for the CPU; the least recently used go above it.
        cleared: whether it was removed, all but the history of chats.
    """

    folder: str
    bytes: int
    limit_bytes: int
    kept: list[Kept]
    cleared: bool = False


@command
def cache(output: Output, clear: Annotated[bool, Option("Remove everything but the chat history.")] = False) -> None:
    """Its content is recreated on demand. Clear it only while no edgekv process runs."""
    report = read_cache()
    if clear:
        report = msgspec.structs.replace(report, cleared=True)
        _clear(Path(report.folder), report.kept)
    if output.as_json:
        print_json(report)
        return
    limit = f"graphs for the CPU at most {format_bytes(report.limit_bytes)} ({LIMIT_VARIABLE})"
    click.echo(f"{report.folder} ({CACHE_VARIABLE}): {format_bytes(report.bytes)}; {limit}")
    for cache in report.kept:
        removed = ", removed" if clear and cache.name != HISTORY else ""
        click.echo(f"  {cache.name:12} {format_bytes(cache.bytes):>9}  {cache.about}{removed}")


def read_cache() -> CacheReport:
    """What the cache folder of this user holds now.

    Raises:
        UsageError: its limit is no size.
    """
    folder = cache_folder()
    sizes = {name: _size_bytes(folder / name) for name in _KINDS}
    kept = [Kept(name, _KINDS[name], size) for name, size in sizes.items() if size]
    total = sum(cache.bytes for cache in kept)
    return CacheReport(folder=str(folder), bytes=total, limit_bytes=cache_limit_bytes(), kept=kept)


def _size_bytes(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size if path.is_file() else 0
    size = 0
    for file in path.rglob("*"):
        with suppress(OSError):  # it went meanwhile
            size += file.stat().st_size if file.is_file() else 0
    return size


def _clear(folder: Path, kept: list[Kept]) -> None:
    for cache in kept:
        path = folder / cache.name
        if cache.name == HISTORY:
            continue
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            raise UsageError(str(path), got=error.strerror, expected="a file of yours", fix="Remove it.") from None
