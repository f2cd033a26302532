"""What a prompt costs where layers share caches: with the layers behind the last owner in every window, or in the last.

    python -m benchmarks.shared_caches [--layers 7] [--tokens 1800] [--cpu-mode fast] [--rounds 3] [--folder DIR]

A decoder of Gemma 4 E2B's widths with fewer layers, four of seven without a cache, as in E2B (20 of 35), and a
vocabulary of 4,096. Weights are random, rounded to nearest in w4a16-lpbq64. Times are processor seconds of one thread,
by turns: other work on the machine does not show in them.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

import edgekv
from benchmarks.large_checkpoint import rounded_to_nearest, write_large_checkpoint
from devices import find
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.quantize.recipe import find_recipe

CONTEXT, VOCAB = 2048, 4096


def write_bundle(folder: Path, layers: int) -> Path:
    """The bundle; what is there is used again."""
    if (bundle := folder / "bundle").exists():
        return bundle
    owners = max(2, 3 * layers // 7)
    kinds = ["sliding_attention"] * layers
    kinds[owners - 1] = kinds[-1] = "full_attention"
    changes = {
        "num_hidden_layers": layers,
        "num_kv_shared_layers": layers - owners,
        "layer_types": kinds,
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
    }
    checkpoint = write_large_checkpoint(folder / "checkpoint", "gemma-4-e2b", changes)
    (folder / "text").write_text("import sys\nprint(sys.argv)\n")
    options = ExportOptions(
        device=find("SM8750"),
        recipe=rounded_to_nearest(find_recipe("w4a16-lpbq64")),
        context=CONTEXT,
        ar=(1, 128),
        calibration=folder / "text",
        check_on_htp=False,
        check_quality=False,
    )
    export_bundle(Checkpoint.open(str(checkpoint)), bundle, options)
    return bundle


def ignore(_: NDArray[Any]) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1800)
    parser.add_argument("--cpu-mode", choices=("emulate", "exact16", "fast"), default="fast")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work; what is there is used again")
    args = parser.parse_args()
    prompt = np.random.default_rng(0).integers(300, VOCAB, args.tokens).tolist()
    with tempfile.TemporaryDirectory() as scratch:
        bundle = write_bundle(args.folder or Path(scratch), args.layers)
        with edgekv.load(bundle, cpu_mode=args.cpu_mode, threads=1) as model:
            session = model.session
            times: tuple[list[float], list[float]] = ([], [])
            for number in range(2 * args.rounds + 2):
                session.reset()
                began = process_time()
                # Whoever takes the logits of each window has every layer run in it.
                session.feed(prompt, take=ignore if number % 2 else None)
                if number > 1:  # the first ones load the graphs
                    times[number % 2].append(process_time() - began)
    last, every = map(median, times)
    print(f"{args.tokens} tokens, {args.cpu_mode}: {last:.1f} s; {every:.1f} s with all layers, {every / last:.2f} x")


if __name__ == "__main__":
    main()
