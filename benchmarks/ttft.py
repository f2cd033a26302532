"""Time to the first token of a prompt with and without a prefix in the prefix store.

    python -m benchmarks.ttft [BUNDLE] [--prompt 480] [--cached 448] [--rounds 9] [--engine cpu]

The embedded model with a context of 512. Cold and warm runs alternate in one process, each prompt with its own salt, so
that no other prefix matches; sessions are created before. Times are medians from the call to the first token.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

import edgekv
from benchmarks.turns import by_turns, turns_table
from devices import find
from docs.results import record
from edgekv.prefix import StoreConfig
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.quantize.recipe import find_recipe

CHECKPOINT = Path(__file__).parent.parent / "models" / "stdlib-4m"


def export(folder: Path) -> Path:
    """The embedded model with a context of 512, not checked on the HTP compiler."""
    options = ExportOptions(
        device=find("SM8650"), recipe=find_recipe("w8a16"), context=(512,), ar=(1, 32), check_on_htp=False
    )
    export_bundle(Checkpoint.open(str(CHECKPOINT)), folder, options)
    return folder


def first_token_ms(model: edgekv.Model, tokens: list[int], salt: str) -> tuple[float, int]:
    """Time to the first token, and how many of the prompt's tokens were restored."""
    began = time.perf_counter_ns()
    generation = model.generate(tokens, 1, cache_salt=salt)
    next(generation)
    return (time.perf_counter_ns() - began) / 1e6, generation.stats.cache.restored_tokens


def measure(model: edgekv.Model, tokens: list[int], cached: int, rounds: int) -> tuple[Table, float]:
    """The table, and how many times shorter the time is with the cache, by medians."""
    numbers, restored = count(), {"cold": 0, "warm": 0}

    def turn(name: str) -> float:
        salt = f"{name} {next(numbers)}"
        if name == "warm":
            list(model.generate(tokens[:cached], 1, cache_salt=salt))
        ms, restored[name] = first_token_ms(model, tokens, salt)
        return ms

    times = by_turns({name: partial(turn, name) for name in restored}, rounds)
    title = (
        f"time to the first token, prompt of {len(tokens)} tokens, {restored['warm']} restored, {model.engine.name}, ms"
    )
    return turns_table(title, times, "cold"), median(times["cold"]) / median(times["warm"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", help="a bundle; the embedded model is exported without one")
    parser.add_argument("--prompt", type=int, default=480, help="tokens of the prompt")
    parser.add_argument("--cached", type=int, default=448, help="tokens of it that the store has")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--engine", default="cpu")
    parser.add_argument("--record", action="store_true", help="write the ratio into docs/results.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = args.bundle or export(Path(folder) / "bundle")
        model = edgekv.load(bundle, args.engine, prefix_cache=StoreConfig(max_tokens=1 << 16))
        tokens = model.encode((CHECKPOINT / "heldout.txt").read_text("utf-8")[: 8 * args.prompt])[: args.prompt]
        table, shorter = measure(model, tokens, args.cached, args.rounds)
        Console().print(table)
        if args.record:
            record(first_token=f"{shorter:.1f} times shorter")


if __name__ == "__main__":
    main()
