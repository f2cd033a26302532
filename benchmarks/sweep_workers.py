"""What a further worker brings: wall and processor time of the same sweep with one worker and with several, by turns.

    python -m benchmarks.sweep_workers CHECKPOINT --text FILE [--recipes w8a16,w4a16,w4a16-lpbq64,w4a16-lpbq32]
        [--workers 2] [--rounds 3] [--calibration-tokens 1024] [--tokens 500]

The layers of the recipes are independent. Each sweep has a store and a cache folder of its own, which are empty at its
start, and neither checks nor compiles graphs. The ratios are of medians, one worker over several.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console

from benchmarks.sweep_saving import Timed, timed
from benchmarks.turns import by_turns, turns_table

_RECIPES = "w8a16,w4a16,w4a16-lpbq64,w4a16-lpbq32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--recipes", default=_RECIPES)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calibration-tokens", default="1024")
    parser.add_argument("--tokens", default="500")
    given = parser.parse_args()
    words = ["sweep", str(given.checkpoint), "--recipes", given.recipes, "--skip-htp-check", "--text", str(given.text)]
    words += ["--calibration-tokens", given.calibration_tokens, "--tokens", given.tokens]
    counts = {f"{count} workers" if count > 1 else "1 worker": count for count in (1, given.workers)}
    contenders = {name: partial(_swept, words, count) for name, count in counts.items()}
    found, one = by_turns(contenders, given.rounds, warm_up=0), "1 worker"
    walls = {name: [each.wall_s for each in times] for name, times in found.items()}
    processors = {name: [each.cpu_s for each in times] for name, times in found.items()}
    console, several = Console(), [*counts][-1]
    console.print(turns_table("wall seconds", walls, one))
    console.print(turns_table("processor seconds", processors, one))
    console.print(f"{several}: {median(walls[one]) / median(walls[several]):.2f} times as fast as one")


def _swept(words: list[str], workers: int) -> Timed:
    with TemporaryDirectory(prefix="edgekv-sweep-") as folder:
        output = Path(folder)
        return timed([*words, "--workers", str(workers), "-o", str(output / "sweep")], output / "cache")


if __name__ == "__main__":
    main()
