"""The commands that README.md and docs/*.md show, and the output that they show below them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOLERANCE = 0.05

_BLOCK = re.compile(
    r"(?P<comments>(?:^<!--[^\n]*-->\n+)*)^```(?P<kind>console|python)\n(?P<text>.*?)^```$", re.M | re.S
)
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
_TOLERANCE = re.compile(r"<!-- tolerance: (\d+) % -->")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_MEASURED = re.compile(r"[ ]?(?:us|ms|s|seconds|minutes|tokens/s|tokens per second|[kMG]i?B (?:of RAM|at most|peak))\b")
"""What follows a number that depends on the machine and its load."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line and the lines of output that are shown for it, which may be none."""

    line: str
    shown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        page: its file.
        kind: `console` or `python`.
        text: what is between the fences.
        not_run: why it cannot run in a test, as a comment above it says: `<!-- not run: REASON -->`.
        tolerance: largest relative difference of a number; `<!-- tolerance: 20 % -->` changes it.
    """

    page: Path
    kind: str
    text: str
    not_run: str | None = None
    tolerance: float = TOLERANCE

    @property
    def commands(self) -> Iterator[Command]:
        """What follows each `$`."""
        lines = self.text.splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
        for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
            shown = lines[start + 1 : stop]
            while shown and not shown[-1].strip():
                shown.pop()
            yield Command(lines[start].removeprefix("$ "), tuple(shown))


def name_of(page: Path) -> str:
    """As tests name it: `guides/export.md`."""
    return page.relative_to(ROOT / "docs" if page.name != "README.md" else ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """The console and Python blocks of a page, in order."""
    found = []
    for match in _BLOCK.finditer(page.read_text("utf-8")):
        reason, tolerance = (pattern.search(match["comments"]) for pattern in (_NOT_RUN, _TOLERANCE))
        found.append(
            Block(
                page,
                match["kind"],
                match["text"],
                reason[1] if reason else None,
                int(tolerance[1]) / 100 if tolerance else TOLERANCE,
            )
        )
    return found


def difference(shown: Sequence[str], printed: Sequence[str], tolerance: float = TOLERANCE) -> str | None:
    """Where printed lines first differ from those that a page shows, or None.

    A line `...` stands for any number of lines, and at the end of a line for its rest. Spaces count as one. Numbers may
    differ by the tolerance; times and RAM are not compared.
    """
    printed = [line for line in printed if line.strip()]
    at = 0
    elided = False
    for is_gap, group in groupby((line for line in shown if line.strip()), lambda line: line.strip() == "..."):
        wanted = [*group]
        if is_gap:
            elided = True
            continue
        starts = range(at, len(printed) - len(wanted) + 1) if elided else [at]
        for start in starts:
            lines = printed[start : start + len(wanted)]
            if len(lines) == len(wanted) and all(
                _same(one, other, tolerance) for one, other in zip(wanted, lines, strict=True)
            ):
                at = start + len(wanted)
                break
        else:
            return f"shown: {wanted}\nprinted: {printed[at:]}"
        elided = False
    if at < len(printed) and not elided:
        return f"printed, but not shown: {printed[at:]}"
    return None


def _same(shown: str, printed: str, tolerance: float) -> bool:
    shown, printed = " ".join(shown.split()), " ".join(printed.split())
    if shown.endswith("..."):
        shown = shown.removesuffix("...").rstrip(" ,")
        words = len(_NUMBER.split(shown))
        kept = [match.end() for match in _NUMBER.finditer(printed)][: words - 1]
        tail = _NUMBER.split(shown)[-1]
        printed = printed[: (kept[-1] if kept else 0) + len(tail)]
    if _NUMBER.split(shown) != _NUMBER.split(printed):
        return False
    pairs = zip(_NUMBER.finditer(shown), _NUMBER.finditer(printed), strict=True)
    return all(_near(one[0], other[0], tolerance) for one, other in pairs if not _MEASURED.match(shown, one.end()))


def _near(shown: str, printed: str, tolerance: float) -> bool:
    one, other = (float(text.replace(",", "")) for text in (shown, printed))
    return abs(one - other) <= tolerance * max(abs(one), abs(other))
