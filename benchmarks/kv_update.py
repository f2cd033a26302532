"""Processor time of advancing the cache alone by one AR-1 step, and bytes copied for it, for each update strategy.

    python -m benchmarks.kv_update [--tensors 256 2048] [--head-dims 64 128] [--rounds 3]

The cache is full and its window slides: each step evicts one token. A step is `KVCache.window`, the addresses of all
past inputs and new outputs where they move (pointer-shift, mirror), and `KVCache.commit`; no graph runs, and handing
the addresses to a runtime is what `benchmarks.host_step` measures. `naive` is what a plain loop does: concatenate past
and new in numpy, drop the oldest row.

A strategy whose window moves runs a whole lap, from the row behind one slide (or turn of the ring) to the next: the
mean holds exactly its share of slides, and the median is a step without one. The others do the same work in each step.
One cache exists at a time: in each round every strategy is built, filled, timed and freed. Each line shows the round
of the median mean. Nothing here waits, so the clock is the thread's processor time: what other processes take of the
core does not count, what they take of the memory's bandwidth does. Reading that clock costs about 0.5 us a step, which
is in all figures.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.turns import by_turns
from docs.results import record
from edgekv.kv import KINDS, STRATEGIES, KeyLayout, KVCache, RowSpec, StrategyName

CONTEXT, KV_HEADS = 2048, 8
RESERVES = {"pointer-shift": (2.0, 1.5)}
KEY_LAYOUTS: dict[StrategyName, tuple[KeyLayout, ...]] = {"mirror": ("rows",)}
STEADY_NS, STEADY_STEPS = 300_000_000, 10
COLUMNS = ("tensors", "D", "strategy", "keys", "steps", "median", "mean", "worst", "bytes / step", "naive / this")

Step = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Turn:
    """Steps in a row: the time of each, and the bytes that all of them copied."""

    times_us: list[float]
    bytes_copied: int

    @property
    def mean_us(self) -> float:
        return statistics.fmean(self.times_us)


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to advance a cache.

    Attributes:
        build: makes a full cache; gives a step, which returns the row where the past began, and a counter of the
            bytes copied.
    """

    name: str
    keys: KeyLayout
    build: Callable[[RowSpec], tuple[Step, Callable[[], int]]]


def managed(strategy: StrategyName, reserve: float) -> Callable[[RowSpec], tuple[Step, Callable[[], int]]]:
    """Builds a cache with this strategy, full but for the step's own token."""

    def build(geometry: RowSpec) -> tuple[Step, Callable[[], int]]:
        cache = KVCache(geometry, ar=(1,), strategy=strategy, reserve=reserve, policy="sliding-window")
        held = geometry.past_rows(1)
        rows = np.full((held, geometry.head_dim), geometry.zero_point, cache.arenas[0].dtype)
        names = [tensor.past for tensor in geometry.names()]
        cache.restore(
            replace(
                cache.state,
                positions=tuple(range(held)),
                position=held,
                rewindable=held,
                tokens_seen=held,
                rows=dict.fromkeys(names, rows),
            )
        )
        bound = (-1, -1)
        addresses = [np.array(store.addresses) for store in cache.arenas]

        def step() -> int:
            nonlocal bound
            (window,) = cache.window(1)
            if bound != (window.past_row, window.new_row):
                for store, bases in zip(cache.arenas, addresses, strict=True):
                    _ = bases + store.past_offset_bytes(window)
                    _ = bases + store.new_offset_bytes(window)
                bound = (window.past_row, window.new_row)
            cache.commit(1)
            return window.past_row

        return step, lambda: cache.stats.bytes_copied

    return build


def naive(geometry: RowSpec) -> tuple[Step, Callable[[], int]]:
    """A full cache of numpy arrays that is copied as a whole in every step."""
    past = [np.zeros((1, 1, geometry.past_rows(1), geometry.head_dim), np.uint8) for _ in geometry.names()]
    new = [np.zeros((1, 1, 1, geometry.head_dim), np.uint8) for _ in geometry.names()]
    copied = 0

    def step() -> int:
        nonlocal copied
        for i, row in enumerate(new):
            whole = np.concatenate((past[i], row), axis=2)
            past[i] = whole[:, :, 1:]
        copied += len(past) * whole.nbytes
        return 0

    return step, lambda: copied


def contenders() -> list[Contender]:
    """The baseline, then every strategy with each reserve and key layout that it supports."""
    made = [Contender("naive", "rows", naive)]
    for strategy in STRATEGIES:
        for reserve, keys in product(RESERVES.get(strategy, (2.0,)), KEY_LAYOUTS.get(strategy, ("rows", "columns"))):
            name = f"{strategy} {reserve}" if strategy in RESERVES else strategy
            made.append(Contender(name, keys, managed(strategy, reserve)))
    return made


def run(contender: Contender, tensors: int, head_dim: int) -> Turn:
    """Build a cache, time one lap of steps (or steady ones, if the window stays), and free it."""
    layers = tensors // (len(KINDS) * KV_HEADS)
    step, copied = contender.build(RowSpec(layers, KV_HEADS, head_dim, CONTEXT, key_layout=contender.keys))
    # The first step after the fill stands where a slide would leave the window, so a lap begins behind it.
    start = row = step()
    before, times_us = copied(), list[float]()
    began = time.thread_time_ns()
    while True:
        entered = time.thread_time_ns()
        reached = step()
        left = time.thread_time_ns()
        times_us.append((left - entered) / 1e3)
        is_steady = reached == start and len(times_us) >= STEADY_STEPS and left - began >= STEADY_NS
        if reached < row or is_steady:
            return Turn(times_us, copied() - before)
        row = reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[256, 2048], help="cache tensors, multiples of 16")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="write 256 tensors of 64 into docs/results.json")
    args = parser.parse_args()
    table = Table(title=f"advancing a full cache by one token, S = {CONTEXT}, uint8, microseconds of processor time")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("strategy", "keys") else "right")
    for tensors, head_dim in product(args.tensors, args.head_dims):
        entrants = contenders()
        turns = {f"{each.name} {each.keys}": partial(run, each, tensors, head_dim) for each in entrants}
        measured = by_turns(turns, args.rounds, warm_up=0).values()
        typical = [sorted(each, key=lambda turn: turn.mean_us)[len(each) // 2] for each in measured]
        for contender, turn in zip(entrants, typical, strict=True):
            steps, mean_us = len(turn.times_us), turn.mean_us
            names = (str(tensors), str(head_dim), contender.name, contender.keys, f"{steps:,}")
            figures = (f"{statistics.median(turn.times_us):,.1f}", f"{mean_us:,.1f}", f"{max(turn.times_us):,.0f}")
            ratio = f"{typical[0].mean_us / mean_us:,.1f}"
            table.add_row(*names, *figures, f"{turn.bytes_copied / steps:,.0f}", ratio)
        table.add_section()
        if args.record and (tensors, head_dim) == (256, 64):
            rows = [
                (each.name, turn.mean_us) for each, turn in zip(entrants, typical, strict=True) if each.keys == "rows"
            ]
            best = dict(sorted(rows, key=lambda row: -row[1]))  # of several reserves, the fastest
            names = {"slot": "slot", "mirror": "mirror", "pointer-shift": "pointer-shift", "naive": "plain copying"}
            found = [f"{shown} {best[name]:,.0f}" for name, shown in names.items()]
            record(cache_update=", ".join([f"{found[0]} us", *found[1:]]))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
