"""Time per token with and without the cache, over the length of the sequence.

    python -m benchmarks.cache_modes [--lengths 32 64 128 256 448] [--tokens 12] [--engine cpu|htp]

Runs the embedded model. `always` runs the newest token alone; `disabled` recomputes the whole sequence with the prefill
graph for each token. Both alternate, so that changes of the machine's speed affect both. A static graph costs the same
for any number of tokens in its context: with the cache a token costs one step at every length, without it one step of
the prefill graph for every 32 tokens of the sequence.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import edgekv
from devices import find
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.quantize.recipe import find_recipe

CHECKPOINT = Path("models/stdlib-4m")
MODES = ("always", "disabled")


def token_times(models: list[edgekv.Model], prompt: list[int], tokens: int) -> list[list[float]]:
    """Milliseconds of each generated token but the first, for each model; both must choose the same tokens."""
    streams = [model.generate(prompt, tokens + 1) for model in models]
    times: list[list[float]] = [[] for _ in models]
    for count in range(tokens + 1):
        chosen = set()
        for stream, measured in zip(streams, times, strict=True):
            began = time.perf_counter_ns()
            chosen.add(next(stream).id)
            if count:
                measured.append((time.perf_counter_ns() - began) / 1e6)
        if len(chosen) > 1:
            raise SystemExit(f"the modes choose different tokens after {len(prompt) + count}: {chosen}")
        if streams[0].stats.stop_reason is not None:
            break
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 64, 128, 256, 448], help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=12, help="tokens that are timed at each length")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--engine", default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bundle = Path(scratch) / "bundle"
        options = ExportOptions(
            device=find("SM8650"), recipe=find_recipe("w8a16"), context=args.context, check_on_htp=False
        )
        export_bundle(Checkpoint.open(str(CHECKPOINT)), bundle, options)
        models = [edgekv.load(bundle, args.engine, cache_mode=mode) for mode in MODES]
        text = models[0].encode((CHECKPOINT / "heldout.txt").read_text("utf-8")[: 16 * args.context])
        table = Table(title=f"median time of a token, context {args.context}, {args.engine}, milliseconds")
        for column in ("tokens", *MODES, "disabled / always"):
            table.add_column(column, justify="right")
        for length in args.lengths:
            times = token_times(models, text[:length], args.tokens)
            if not times[0]:
                raise SystemExit(f"the text ends after {length} tokens: choose another length")
            cached, anew = (statistics.median(each) for each in times)
            table.add_row(str(length), f"{cached:.2f}", f"{anew:.2f}", f"{anew / cached:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
