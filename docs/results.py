"""The figures of docs/results.json, and the pages that state them.

    python -m docs.results                                                writes the pages again
    edgekv eval BUNDLE --text FILE --json | python -m docs.results KEY    takes the row of this key from a measurement

`edgekv compare` prints such a measurement too, and that of `edgekv sweep` has one for each combination: without KEY,
each `RECIPE:KV` that has a goal takes its own. Benchmarks with `--record` write what they measured by `record`. A page
has a figure or a table between `<!-- results: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from math import floor, log10
from pathlib import Path
from typing import ClassVar

import msgspec

from edgekv.machine.scratch import atomic_file

FILE = Path(__file__).with_suffix(".json")
PAGES = tuple(FILE.parent / name for name in ("results.md", "notebook/measurements.md"))
MARKED = re.compile(r"(<!-- results: (\S+) -->)(.*?)(<!-- end -->)", re.DOTALL)


class Quality(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
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


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
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


class Retrieval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an embedder ranks documents, beside the float model.

    Attributes:
        label: the model and the recipe.
        cosine: with the float model's embeddings, the mean of all texts.
        min_cosine: of the text that has the least.
        rank: correlation of the order of documents with the float model's, the mean of all queries.
        min_rank: of the query that has the least.
        same_first: queries whose first document is the float model's, %.
        found: queries whose own document is among the first ten, %.
        exact_found: the same of the float model.
    """

    COLUMNS: ClassVar = (
        "model, recipe", "cosine (least)", "rank correlation (least)", "same first document",
        "own document in the first ten (float)",
    )  # fmt: skip

    label: str
    cosine: str
    min_cosine: str
    rank: str
    min_rank: str
    same_first: str
    found: str
    exact_found: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of a table."""
        found = f"{_percent(self.found)} ({_percent(self.exact_found)})"
        pairs = ((self.cosine, self.min_cosine), (self.rank, self.min_rank))
        return self.label, *(f"{mean} ({least})" for mean, least in pairs), _percent(self.same_first), found


class Goal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an export must reach: at most this perplexity ratio and divergence, at least this agreement, in %.

    Attributes:
        measured: key of the row that is compared.
    """

    perplexity: str
    kl: str
    top1: str
    measured: str


class Export(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an export took.

    Attributes:
        shape: of the model, in the results.
        measured: the same in the table of measurements; empty for exports of another table.
        time: wall time.
        ram: of edgekv.
        compiler_ram: of the compiler.
        binaries: what was written.
        key: by which `benchmarks.large_export` finds the row.
    """

    shape: str
    time: str
    ram: str
    compiler_ram: str
    measured: str = ""
    binaries: str = ""
    key: str = ""


class Results(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The file.

    Attributes:
        windows_512: on windows of 512 tokens.
        windows_1024: on windows of 1,024 tokens.
        older: by earlier versions.
        front: recipes by bytes, loss and speed.
        shown: labels of the rows that the results show, by key.
        goals: by recipe and cache type: `w8a16:u8`.
        retrieval: embedders.
        exports: of large shapes.
        facts: single figures, by name.
    """

    windows_512: list[Quality]
    windows_1024: list[Quality]
    older: list[Quality]
    front: list[Point]
    shown: dict[str, str]
    goals: dict[str, Goal]
    retrieval: list[Retrieval]
    exports: list[Export]
    facts: dict[str, str]

    def row(self, key: str) -> Quality:
        """The row with a key."""
        (found,) = (each for each in (*self.windows_512, *self.windows_1024, *self.older) if each.key == key)
        return found


def read() -> Results:
    """The content of the file."""
    return msgspec.json.decode(FILE.read_bytes(), type=Results)


class Measured(msgspec.Struct, frozen=True):
    """What `edgekv eval`, `compare` and `sweep` say of a bundle's quality in their JSON."""

    perplexity_ratio: float
    perplexity_ratio_error: float
    kl_nats: float
    top1_agreement: float

    def row(self, old: Quality) -> Quality:
        """The row with these figures. A ratio has the digits of its error, which has two."""
        error = max(self.perplexity_ratio_error, 1e-6)
        digits = 1 - floor(log10(error))
        return msgspec.structs.replace(
            old,
            perplexity=f"{self.perplexity_ratio:.{digits}f}",
            error=f"{error:.{digits}f}",
            kl=f"{self.kl_nats:.4f}",
            top1=f"{100 * self.top1_agreement:.1f}",
        )


class Swept(msgspec.Struct, frozen=True):
    """A combination of a sweep."""

    recipe: str
    kv: str
    evaluation: Measured


class Sweep(msgspec.Struct, frozen=True):
    """The JSON of `edgekv sweep`."""

    results: list[Swept]


def with_quality(results: Results, measured: bytes, key: str | None) -> Results:
    """The results with rows from a measurement.

    Args:
        results: as they were.
        measured: the JSON of `edgekv eval`, `compare` or `sweep`.
        key: of the row; None for the rows of the goals of a sweep's combinations.

    Raises:
        KeyError: no row has the key, or no combination a goal.
        msgspec.ValidationError: the JSON is of another command.
    """
    if key is None:
        swept = msgspec.json.decode(measured, type=Sweep).results
        named = {f"{each.recipe}:{each.kv}": each.evaluation for each in swept}
        new = {goal.measured: named[name] for name, goal in results.goals.items() if name in named}
        if not new:
            raise KeyError(f"docs/results.json has no goal for {', '.join(named) or 'a sweep without results'}")
    else:
        new = {key: msgspec.json.decode(measured, type=Measured)}
    kinds = {kind: getattr(results, kind) for kind in ("windows_512", "windows_1024", "older")}
    if unknown := new.keys() - {row.key for rows in kinds.values() for row in rows}:
        raise KeyError(f"no row of docs/results.json has the key {', '.join(sorted(unknown))}")
    changed = {kind: [new[row.key].row(row) if row.key in new else row for row in rows] for kind, rows in kinds.items()}
    return msgspec.structs.replace(results, **changed)


def write(results: Results, file: Path = FILE, pages: Sequence[Path] = PAGES) -> None:
    """Write the file, and its figures into the pages."""
    with atomic_file(file) as part:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    for page in pages:
        page.write_text(rendered(page.read_text("utf-8"), results), "utf-8")


def record(**facts: str) -> None:
    """Write single figures, by their names with _ for -.

    Raises:
        KeyError: no page states such a figure.
    """
    results, new = read(), {name.replace("_", "-"): text for name, text in facts.items()}
    if unknown := new.keys() - results.facts.keys():
        raise KeyError(f"docs/results.json has no figure {', '.join(sorted(unknown))}")
    write(msgspec.structs.replace(results, facts=results.facts | new))


def record_export(key: str, **figures: str) -> None:
    """Write what the export of a shape took: fields of `Export`.

    Raises:
        KeyError: no row has the key.
    """
    results = read()
    if key not in {row.key for row in results.exports}:
        raise KeyError(f"no row of exports in docs/results.json has the key {key}")
    rows = [msgspec.structs.replace(row, **figures) if row.key == key else row for row in results.exports]
    write(msgspec.structs.replace(results, exports=rows))


def with_retrieval(results: Results, rows: Sequence[Retrieval]) -> Results:
    """The results with how embedders rank; each row replaces that of its label, or is a new one."""
    labelled = {row.label: row for row in (*results.retrieval, *rows)}
    return msgspec.structs.replace(results, retrieval=[*labelled.values()])


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


def _retrieval(results: Results) -> str:
    return _table(Retrieval.COLUMNS, (row.cells for row in results.retrieval))


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
    "retrieval": _retrieval,
    "exports": _exports,
    "windows-512": _windows_512,
    "windows-1024": _windows_1024,
    "older": _older,
    "front": _front,
    "exports-measured": _exports_measured,
}

if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else None
    is_measured = given is not None or not sys.stdin.isatty()
    measured = sys.stdin.buffer.read() if is_measured else b""
    write(with_quality(read(), measured, given) if measured.strip() else read())
