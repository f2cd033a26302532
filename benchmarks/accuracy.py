"""The accuracy loss of quantization on the embedded model, and the difference between HTP emulator and CPU.

    python -m benchmarks.accuracy [--tokens 4096] [--htp-tokens 512]

Held-out text, teacher forced. The CPU is compared with the float32 reference on `--tokens`, the HTP with both on
`--htp-tokens`; cache tensors are compared integer by integer after each window.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import edgekv
from benchmarks.agreement import agreement, agreement_table
from devices import find
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.inspect.evaluate import evaluate, evaluation_windows
from exporters.quantize.recipe import find_recipe

CHECKPOINT = Path("models/stdlib-4m")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--htp-tokens", type=int, default=512)
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    console = Console()
    checkpoint = Checkpoint.open(str(CHECKPOINT))
    text = (CHECKPOINT / "heldout.txt").read_text("utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        bundle = Path(scratch) / "bundle"
        options = ExportOptions(
            device=find("SM8650"), recipe=find_recipe("w8a16"), context=args.context, check_on_htp=False
        )
        export_bundle(checkpoint, bundle, options)
        cpu, htp = (edgekv.load(bundle, engine=engine) for engine in ("cpu", "htp"))

        table = Table(title="against the float32 reference, held-out text", box=SIMPLE)
        for column in ("engine", "tokens", "perplexity ratio", "KL, nats", "top-1", "SQNR (least), dB"):
            table.add_column(column, justify="right")
        for model, tokens in ((cpu, args.tokens), (cpu, args.htp_tokens), (htp, args.htp_tokens)):
            found = evaluate(model, checkpoint, text, "heldout.txt", tokens=tokens)
            table.add_row(
                found.engine,
                str(found.tokens),
                f"{found.perplexity_ratio:.5f} +- {found.perplexity_ratio_error:.5f}",
                f"{found.kl_nats:.5f}",
                f"{found.top1_agreement:.2%}",
                f"{found.token_sqnr_db:.1f} ({found.least_token_sqnr_db:.1f})",
            )
        console.print(table)

        windows = evaluation_windows(checkpoint, text, cpu.bundle.manifest, args.htp_tokens - 1)
        console.print(agreement_table(agreement(cpu, htp, [each.inputs for each in windows])))


if __name__ == "__main__":
    main()
