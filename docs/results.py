"""Writes the figures of docs/results.json into the pages that state them: `python -m docs.results`.

A page has a figure or a table between `<!-- results: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import msgspec

FILE = Path(__file__).with_suffix(".json")
PAGES = tuple(FILE.parent / name for name in ("results.md", "notebook/measurements.md"))
MARKED = re.compile(r"(<!-- results: (\S+) -->)(.*?)(<!-- end -->)", re.DOTALL)


class Quality(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle lost. Figures are decimal texts: their digits say how far they are known.

    Attributes:
        label: the recipe, in the table of measurements.
        mb: size of the bundle.
        perplexity: over that of the float reference.
        kl: divergence from it, nats a token.
        top1: agreement, %.
        error: standard error of the perplexity ratio.
        prose: the divergence that the export measured on its prose.
        chat: on its chat.
        template: on the tokens of the chat's template.
        export: processor time.
        sqnr: per token, dB, and the least.
        key: by which other parts of the file name the row.
    """

    label: str
    perplexity: str
    kl: str
    top1: str
    mb: str = ""
    error: str = ""
    prose: str = ""
    chat: str = ""
    template: str = ""
    export: str = ""
    sqnr: str = ""
    key: str = ""


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A recipe by all that it costs; empty what is not measured.

    Attributes:
        label: the recipe.
        mb: size of the bundle.
        kl: divergence on WikiText-2, nats a token.
        top1: agreement there, %.
        prose: the divergence that the export measured on its prose.
        chat: on its chat.
        decode: simulated tokens a second on QCS9100 and on SA8797, keys as rows.
        prefill: the same of 32 tokens a pass.
        columns: `decode` with keys as columns.
    """

    label: str
    mb: str = ""
    kl: str = ""
    top1: str = ""
    prose: str = ""
    chat: str = ""
    decode: str = ""
    prefill: str = ""
    columns: str = ""


class Goal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an export must reach: at most this perplexity ratio and divergence, at least this agreement, in %.

    Attributes:
        measured: key of the row that is compared.
    """

    perplexity: str
    kl: str
    top1: str
    measured: str


class Export(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an export took.

    Attributes:
        shape: of the model, in the results.
        measured: the same in the table of measurements; empty for exports of another table.
        time: wall time.
        ram: of edgekv.
        compiler_ram: of the compiler.
        binaries: what was written.
    """

    shape: str
    time: str
    ram: str
    compiler_ram: str
    measured: str = ""
    binaries: str = ""


class Results(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file.

    Attributes:
        windows_512: on windows of 512 tokens.
        windows_1024: on windows of 1,024 tokens.
        older: by earlier versions.
        front: recipes by bytes, loss and speed.
        shown: labels of the rows that the results show, by key.
        goals: by recipe and cache type, as `benchmarks.real_weights` names them.
        exports: of large shapes.
        facts: single figures, by name.
    """

    windows_512: list[Quality]
    windows_1024: list[Quality]
    older: list[Quality]
    front: list[Point]
    shown: dict[str, str]
    goals: dict[str, Goal]
    exports: list[Export]
    facts: dict[str, str]

    def row(self, key: str) -> Quality:
        """The row with a key."""
        (found,) = (each for each in (*self.windows_512, *self.windows_1024, *self.older) if each.key == key)
        return found


def read() -> Results:
    """The content of the file."""
    return msgspec.json.decode(FILE.read_bytes(), type=Results)


def rendered(text: str, results: Results) -> str:
    """A page with the figures of the file.

    Raises:
        KeyError: the file has no figure of a name.
    """

    def put(match: re.Match[str]) -> str:
        name = match[2]
        content = f"\n\n{TABLES[name](results)}\n\n" if name in TABLES else results.facts[name]
        return f"{match[1]}{content}{match[4]}"

    return MARKED.sub(put, text)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def _percent(number: str) -> str:
    return f"{number} %" if number else ""


def _ratio(row: Quality) -> str:
    return f"x {row.perplexity}" + (f" +- {row.error}" if row.error else "")


def _rounded(number: str) -> str:
    """Four decimals below 0.01, else three."""
    step = Decimal("0.0001" if Decimal(number) < Decimal("0.01") else "0.001")
    return str(Decimal(number).quantize(step, ROUND_HALF_UP))


def _windows_512(results: Results) -> str:
    header = "recipe", "bundle", "perplexity", "KL, nats a token", "top-1", "KL of prose, of the chat"
    rows = []
    for row in results.windows_512:
        texts = ", ".join(filter(None, (row.prose, row.chat)))
        texts += f"; tokens of its template {row.template}" if row.template else ""
        rows.append((row.label, f"{row.mb} MB", _ratio(row), row.kl, _percent(row.top1), texts, row.export))
    return _table((*header, "export, processor time"), rows)


def _windows_1024(results: Results) -> str:
    header = "recipe or file", "MB", "perplexity", "KL, nats a token", "top-1", "KL of a chat, and of its template"
    rows = []
    for row in results.windows_1024:
        texts = ", ".join(filter(None, (row.chat, row.template)))
        rows.append((row.label, row.mb, _ratio(row), row.kl, _percent(row.top1), texts, row.export))
    return _table((*header, "export, processor time"), rows)


def _front(results: Results) -> str:
    header = "recipe", "MB", "KL, nats a token", "top-1", "KL of prose, of a chat"
    speeds = "decode, keys as rows", "as columns", "prefill"
    rows = []
    for row in results.front:
        texts = ", ".join(filter(None, (row.prose, row.chat)))
        rows.append((row.label, row.mb, row.kl, _percent(row.top1), texts, row.decode, row.columns, row.prefill))
    return _table((*header, *speeds), rows)


def _older(results: Results) -> str:
    header = "recipe", "perplexity", "KL, nats a token", "top-1", "SQNR per token (least)"
    return _table(header, ((row.label, _ratio(row), row.kl, _percent(row.top1), row.sqnr) for row in results.older))


def _quality(results: Results) -> str:
    header = "recipe, uint8 cache unless said", "perplexity", "KL, nats a token", "top-1"
    rows = []
    for key, label in results.shown.items():
        row = results.row(key)
        losses = [row.kl, row.chat, row.template]
        kl, chat, template = (_rounded(each) if each else "" for each in losses)
        rows.append((f"{label}: {row.mb} MB", f"x {row.perplexity}", kl, _percent(row.top1), chat, template))
    return _table((*header, "KL on a chat", "on its template alone"), rows)


def _goals(results: Results) -> str:
    rows = []
    for name, goal in results.goals.items():
        row = results.row(goal.measured)
        pairs = (
            ("perplexity", f"x {row.perplexity}", f"x {goal.perplexity}", is_above(row.perplexity, goal.perplexity)),
            ("KL", row.kl, goal.kl, is_above(row.kl, goal.kl)),
            ("top-1", _percent(row.top1), _percent(goal.top1), is_above(goal.top1, row.top1)),
        )
        if missed := [f"{what} {found}, not {wanted}" for what, found, wanted, is_missed in pairs if is_missed]:
            rows.append((name.replace(":", ", "), "; ".join(missed)))
    return _table(("recipe, cache", "missed"), rows)


def is_above(number: str, limit: str) -> bool:
    """Compare two decimal texts."""
    return Decimal(number) > Decimal(limit)


def _exports(results: Results) -> str:
    header = "shape, w4a16-lpbq64 unless said", "time", "RAM of edgekv", "RAM of the compiler"
    shown = [each for each in results.exports if each.shape]
    return _table(header, ((each.shape, each.time, each.ram, each.compiler_ram) for each in shown))


def _exports_measured(results: Results) -> str:
    header = "shape", "time", "RAM edgekv", "RAM compiler", "binaries"
    rows = [each for each in results.exports if each.measured]
    return _table(header, ((each.measured, each.time, each.ram, each.compiler_ram, each.binaries) for each in rows))


TABLES: dict[str, Callable[[Results], str]] = {
    "quality": _quality,
    "goals": _goals,
    "exports": _exports,
    "windows-512": _windows_512,
    "windows-1024": _windows_1024,
    "older": _older,
    "front": _front,
    "exports-measured": _exports_measured,
}

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rendered(page.read_text("utf-8"), read()), "utf-8")
