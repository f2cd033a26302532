"""Retrieval with embeddings of bundles, beside that of the float model: does each query rank the documents alike?

    python -m benchmarks.retrieval [--checkpoint DIR] [--recipes w8a16,w4a16,w4a16-lpbq64] [--documents 300] [--record]

Queries are first lines of the standard library's docstrings, documents what follows them, each text cut to the context.
A checkpoint is a folder of sentence-transformers; without one it is the embedded model, with the mean of all tokens and
with the last one. Each recipe is exported by itself, with the default calibration, and its bundle runs on the CPU in
`emulate`, which computes the integers of the HTP. `--record` writes the rows into docs/results.json.

Per query, the order of all documents is compared with the float model's (rank correlation, Spearman); found is the
share of queries whose own document is among the first ten.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import edgekv
from benchmarks.embedding import library_docstrings
from docs.results import Retrieval, read, with_retrieval, write
from edgekv.embed import pooled
from edgekv.spec import EmbeddingTask
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import export_bundle
from exporters.options import ExportOptions
from exporters.quantize.recipe import find_recipe
from exporters.quantize.reference import Reference

Vectors = NDArray[np.float32]
EMBEDDED = Path(__file__).parent.parent / "models" / "stdlib-4m"
CONTEXT = 128
_FIRST = 10
_MIN_WORDS = 4
_POOLINGS = {"mean": "mean of all tokens", "lasttoken": "last token"}


@dataclass(frozen=True, slots=True)
class Search:
    """Texts that look for others.

    Attributes:
        queries: them.
        documents: as many; a query's own has its number.
    """

    queries: list[str]
    documents: list[str]

    @classmethod
    def of_library(cls, count: int) -> Search:
        """First lines of docstrings, and what follows them; no two are equal."""
        found = dict[str, str]()
        for text in library_docstrings():
            query, _, rest = text.partition("\n")
            document = " ".join(rest.split())
            enough = min(len(query.split()), len(document.split())) >= _MIN_WORDS
            if enough and query not in found and document not in found.values():
                found[query] = document
            if len(found) == count:
                return cls([*found], [*found.values()])
        sys.exit(f"got {len(found)} docstrings; expected {count}")


@dataclass(frozen=True, slots=True)
class Agreement:
    """How embeddings rank documents, beside exact ones.

    Attributes:
        cosine: with the exact embedding, the mean over all texts.
        min_cosine: of the text that has the least.
        rank: correlation of ranks, the mean over queries.
        min_rank: of the query that has the least.
        same_first: share of queries that put the same document first.
        found: share of queries whose own document is among the first ten.
        exact_found: the same of exact embeddings.
    """

    cosine: float
    min_cosine: float
    rank: float
    min_rank: float
    same_first: float
    found: float
    exact_found: float

    @classmethod
    def of(cls, exact: Vectors, vectors: Vectors) -> Agreement:
        """Compare embeddings `[2 n, width]`: of n queries, and behind them of their documents."""
        exact, vectors = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (exact, vectors))
        cosines, half = (exact * vectors).sum(1), len(exact) // 2
        ranks = [(-each[:half] @ each[half:].T).argsort(1, kind="stable").argsort(1) for each in (exact, vectors)]
        correlations = [np.corrcoef(one, other)[0, 1] for one, other in zip(*ranks, strict=True)]
        exact_found, found = ((np.diagonal(each) < _FIRST).mean() for each in ranks)
        return cls(
            cosine=float(cosines.mean()),
            min_cosine=float(cosines.min()),
            rank=float(np.mean(correlations)),
            min_rank=float(np.min(correlations)),
            same_first=float((ranks[0].argmin(1) == ranks[1].argmin(1)).mean()),
            found=float(found),
            exact_found=float(exact_found),
        )

    def row(self, label: str) -> Retrieval:
        """It as a row of docs/results.json."""
        return Retrieval(
            label=label,
            cosine=f"{self.cosine:.5f}",
            min_cosine=f"{self.min_cosine:.4f}",
            rank=f"{self.rank:.4f}",
            min_rank=f"{self.min_rank:.4f}",
            same_first=f"{100 * self.same_first:.1f}",
            found=f"{100 * self.found:.1f}",
            exact_found=f"{100 * self.exact_found:.1f}",
        )


def embedded(folder: Path, pooling: str) -> Path:
    """The embedded model as an embedder: a folder of sentence-transformers."""
    shutil.copytree(EMBEDDED, folder)
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")])
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    return folder


def exact_embeddings(checkpoint: Checkpoint, texts: Sequence[str]) -> Vectors:
    """Those of the float model, `[texts, width]`."""
    assert isinstance(checkpoint.task, EmbeddingTask)
    windows = [np.array(checkpoint.encode(text, around=True)) for text in texts]
    return np.stack([pooled(checkpoint.task, rows) for rows in Reference(checkpoint).logits(windows)])


def cut(checkpoint: Checkpoint, text: str, tokens: int) -> str:
    """The first words of a text, cut to a number of tokens."""
    words = text.split()
    while len(checkpoint.encode(" ".join(words), around=True)) > tokens:
        words.pop()
    return " ".join(words)


def measured(folder: Path, recipes: Sequence[str], search: Search) -> Iterator[tuple[str, Agreement]]:
    """Each recipe of a checkpoint and how it ranks."""
    checkpoint = Checkpoint.open(str(folder))
    if not isinstance(checkpoint.task, EmbeddingTask):
        sys.exit(f"{folder}: got no embedder; expected a folder of sentence-transformers, with modules.json")
    # A token is left for the sink.
    texts = [cut(checkpoint, text, CONTEXT - 1) for text in (*search.queries, *search.documents)]
    exact, steps = exact_embeddings(checkpoint, texts), {} if checkpoint.spec.bidirectional else {"ar": (1, 32)}
    for recipe in recipes:
        with TemporaryDirectory() as scratch:
            options = ExportOptions(
                recipe=find_recipe(recipe), context=CONTEXT, check_on_htp=False, check_quality=False, **steps
            )
            export_bundle(checkpoint, Path(scratch) / "bundle", options)
            with edgekv.load(Path(scratch) / "bundle", cpu_mode="emulate") as model:
                yield recipe, Agreement.of(exact, model.embed(texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--recipes", default="w8a16,w4a16,w4a16-lpbq64")
    parser.add_argument("--documents", type=int, default=300)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    search, rows = Search.of_library(args.documents), list[Retrieval]()
    with TemporaryDirectory() as scratch:
        folders = {args.checkpoint.name: args.checkpoint} if args.checkpoint else {}
        if not folders:
            named = {f"embedded model, {words}": name for name, words in _POOLINGS.items()}
            folders = {label: embedded(Path(scratch) / name, name) for label, name in named.items()}
        for name, folder in folders.items():
            for recipe, agreement in measured(folder, args.recipes.split(","), search):
                rows.append(agreement.row(f"{name}, {recipe}"))
                print(rows[-1].label, flush=True)
    table = Table(title=f"{len(search.queries)} queries and documents")
    for column in Retrieval.COLUMNS:
        table.add_column(column, justify="right" if table.columns else "left")
    for row in rows:
        table.add_row(*row.cells)
    Console(width=140).print(table)
    if args.record:
        write(with_retrieval(read(), rows))


if __name__ == "__main__":
    main()
