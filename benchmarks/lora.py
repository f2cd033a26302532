"""What slots for adapters cost on the CPU: decode time with and without, and the time of a swap.

    python -m benchmarks.lora BUNDLE SLOTS [--lora A,B] [--cpu-mode fast] [--tokens 24] [--rounds 8]

BUNDLE and SLOTS are exports of one checkpoint, without and with slots. They decode by turns in one process, so that
other load on the machine meets both; times are of the processor, on one thread, and ratios are of medians. A swap is
the time from one adapter to another in loaded graphs: the session's reset and the binding of every input.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import cycle
from statistics import median
from time import perf_counter, process_time

from rich.console import Console

import edgekv
from benchmarks.turns import by_turns, turns_table

PROMPT = "The weather on the coast"


def decode_ms(model: edgekv.Model, tokens: int, lora: str | None) -> float:
    """Mean processor time of a decoded token: other load on the machine disturbs it less than the clock's."""
    generation = model.generate(PROMPT, tokens, temperature=0, ignore_eos=True, lora=lora)
    next(generation)  # the prompt
    began = process_time()
    count = sum(1 for _ in generation)
    return (process_time() - began) * 1e3 / count


def swap_ms(model: edgekv.Model, names: list[str], rounds: int) -> tuple[float, float]:
    """Median time of a swap in loaded graphs, and of opening an adapter for the first time."""
    opened, took, first = [], [], []
    for name in names:
        began = perf_counter()
        opened.append(model.open_lora(name))
        first.append((perf_counter() - began) * 1e3)
    graphs, session = model.engine.graphs, model.session
    for adapter, _ in zip(cycle(opened), range(rounds), strict=False):
        began = perf_counter()
        session.adapt(adapter)
        graphs.use(session.cache, adapter)
        took.append((perf_counter() - began) * 1e3)
        session.feed(model.encode(PROMPT)[:1])
    return median(took[len(opened) :]), median(first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("slots")
    parser.add_argument("--lora", help="adapters of SLOTS, with commas between")
    parser.add_argument("--cpu-mode", default="fast")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    names = args.lora.split(",") if args.lora else []
    plain = edgekv.load(args.bundle, threads=1, cpu_mode=args.cpu_mode)
    slots = edgekv.load(args.slots, threads=1, cpu_mode=args.cpu_mode)
    runs = {"without slots": (plain, None), "slots, no adapter": (slots, None)}
    runs |= {f"slots, {name}": (slots, name) for name in names[:1]}
    turns = {label: partial(decode_ms, model, args.tokens, lora) for label, (model, lora) in runs.items()}
    times = by_turns(turns, args.rounds)
    Console().print(turns_table(f"{args.cpu_mode}: ms of the processor a token", times, "without slots"))
    if names:
        swap, first = swap_ms(slots, names, 20)
        print(f"  swap {swap:.2f} ms; opening an adapter {first:.1f} ms")


if __name__ == "__main__":
    main()
