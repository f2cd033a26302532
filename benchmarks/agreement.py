"""How closely HTP emulator and CPU engine agree on a bundle, integer by integer, token by token.

    python -m benchmarks.agreement BUNDLE TEXT [--tokens 512] [--record embedded]

Cache tensors are compared after each window. What a bundle lost against the float model is `edgekv eval --engine`.
`--record` writes the figures of the embedded model or of smollm2 into docs/results.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import edgekv
from docs.results import record
from exporters.inspect.evaluate import evaluation_windows, open_source


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two engines on the same tokens.

    Attributes:
        tokens: number of tokens.
        top1: share of tokens after which both have the same most likely token.
        logits_steps: mean difference of the logits, in steps of their encoding.
        logits_max_steps: the largest.
        cache_steps: mean difference of the cached keys and values, in steps of their encodings.
        cache_max_steps: the largest.
    """

    tokens: int
    top1: float
    logits_steps: float
    logits_max_steps: float
    cache_steps: float
    cache_max_steps: int


def agreement(one: edgekv.Model, other: edgekv.Model, windows: Iterable[NDArray[np.int64]]) -> Agreement:
    """Score windows of token ids `[T]` on both models, which are one bundle on two engines."""
    step = one.bundle.manifest.encodings["logits"].scale
    agreed = tokens = 0
    logits: list[NDArray[np.float32]] = []
    cache: list[NDArray[np.int32]] = []
    for window in windows:
        a, b = one.score(window.tolist()), other.score(window.tolist())
        agreed += int((a.argmax(-1) == b.argmax(-1)).sum())
        tokens += len(window)
        logits.append(np.abs(a - b).ravel() / step)
        cache.append(np.abs(_held_rows(one) - _held_rows(other)).ravel())
    differences, rows = np.concatenate(logits), np.concatenate(cache)
    return Agreement(
        tokens=tokens,
        top1=agreed / tokens,
        logits_steps=float(differences.mean()),
        logits_max_steps=float(differences.max()),
        cache_steps=float(rows.mean()),
        cache_max_steps=int(rows.max()),
    )


def agreement_table(found: Agreement) -> Table:
    """A table of one row."""
    table = Table(title="HTP emulator against CPU engine: same graphs, same tokens", box=SIMPLE)
    for column in ("tokens", "top-1", "logits: mean steps", "most", "cache: mean steps", "most"):
        table.add_column(column, justify="right")
    table.add_row(
        str(found.tokens),
        f"{found.top1:.2%}",
        f"{found.logits_steps:.2f}",
        f"{found.logits_max_steps:.0f}",
        f"{found.cache_steps:.4f}",
        str(found.cache_max_steps),
    )
    return table


def _held_rows(model: edgekv.Model) -> NDArray[np.int32]:
    """The cache's integers, `[N, tokens, D]`, oldest token first."""
    return model.cache.arena.array[:, model.cache.held_rows()].astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--record", choices=("embedded", "smollm2"))
    args = parser.parse_args()
    with edgekv.load(args.bundle) as cpu, edgekv.load(args.bundle, "htp") as htp:
        manifest, text = cpu.bundle.manifest, args.text.read_text("utf-8")
        windows = evaluation_windows(open_source(manifest, None), text, manifest, args.tokens - 1)
        found = agreement(cpu, htp, [each.inputs for each in windows])
    Console().print(agreement_table(found))
    if args.record:
        figures = {"agreement": f"{found.top1:.1%}".replace("%", " %"), "steps": f"{found.cache_steps:.2g}"}
        record(**{f"{name}_{args.record}": text for name, text in figures.items()})


if __name__ == "__main__":
    main()
