"""The accuracy loss of each recipe on the embedded model, compared to rounding to nearest at the same bits.

    python -m benchmarks.quantization [--tokens 4096] [--effort 3]

Whole bundles on the CPU engine, uint8 cache, held-out text, teacher forced. `nearest` is the recipe with every method
replaced by `nearest` and without its rotation. The recipes themselves are exported with `--effort`.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

import edgekv
from devices import find
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.inspect.evaluate import Evaluation, evaluate
from exporters.quantize.effort import EFFORTS, Effort
from exporters.quantize.recipe import Recipe, find_recipe

CHECKPOINT = Path("models/stdlib-4m")
RECIPES = ("w8a16", "w4a16", "w4a16-lpbq32", "w4a16-lpbq32-updown8", "w4a16-lpbq64")  # 704 is no multiple of 128


def rounded_to_nearest(recipe: Recipe) -> Recipe:
    """The same types, chosen without calibration."""
    rules = tuple(msgspec.structs.replace(rule, method="nearest") for rule in recipe.weights)
    return msgspec.structs.replace(recipe, weights=rules, rotation="none")


def measure(checkpoint: Checkpoint, recipe: Recipe, tokens: int, effort: Effort = EFFORTS[0]) -> Evaluation:
    text = (checkpoint.folder / "heldout.txt").read_text("utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        bundle = Path(scratch) / "bundle"
        options = ExportOptions(find("SM8650"), recipe, check_on_htp=False, effort=effort)
        export_bundle(checkpoint, bundle, options)
        return evaluate(edgekv.load(bundle), checkpoint, text, "heldout.txt", tokens=tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--effort", type=partial(Effort.parse, "--effort"), default=EFFORTS[0], metavar="1..5")
    args = parser.parse_args()
    checkpoint = Checkpoint.open(str(CHECKPOINT))
    table = Table(title=f"perplexity against float32, {args.tokens} held-out tokens")
    for column in ("recipe", "ratio", "KL", "top-1", "SQNR dB", "nearest: ratio", "KL", "top-1", "SQNR dB"):
        table.add_column(column, justify="right")
    for name in RECIPES:
        recipe = find_recipe(name)
        cells = []
        for each, effort in ((recipe, args.effort), (rounded_to_nearest(recipe), EFFORTS[0])):
            found = measure(checkpoint, each, args.tokens, effort)
            cells += [f"{found.perplexity_ratio:.5f}", f"{found.kl_nats:.5f}"]
            cells += [f"{found.top1_agreement:.2%}", f"{found.sqnr_db:.1f}"]
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
