"""The cost of the prefix store: microseconds per block to match and insert, and the bandwidth of a restored prefix.

    python -m benchmarks.prefix_store [--sequences 10000] [--naive 1000] [--tokens 2000]

Sequences share one of 20 prefixes of 8 blocks, followed by 8 blocks of their own; rows are as small as they can
be, so that the first table measures the search. `list scan` keeps all sequences in a list and compares each new one
with all of them, token by token; it is run on fewer sequences, since its cost grows with their square. The second
table copies a prefix of Llama-3.2-1B's cache shape into strided memory, against a plain copy of as many bytes, and
against copies of the same blocks without the store: 256 runs of 2 KiB each, whose cost is that of the memory, not of
the store. They take turns. The third is about a folder: what a process pays for 2,000 blocks that another one has saved
since its last call, and how long `edgekv prefix ls` reads for 100 sequences of 4,096 tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.turns import by_turns
from edgekv.kv import RowSpec
from edgekv.prefix import GroupRows, PrefixStore, StoreConfig, stored_prefixes

STEP, SHARED_BLOCKS, OWN_BLOCKS, BEGINNINGS = 32, 8, 8, 20
SMALL = RowSpec(layers=1, kv_heads=1, head_dim=1, window=1024)
LLAMA_1B = RowSpec(layers=16, kv_heads=8, head_dim=64, window=4096)
Tokens = tuple[int, ...]


def make_sequences(count: int) -> list[Tokens]:
    """Sequences of which every 20th begins alike."""
    draw = random.Random(0)
    beginnings = [[draw.randrange(128_000) for _ in range(SHARED_BLOCKS * STEP)] for _ in range(BEGINNINGS)]
    return [
        tuple(beginnings[i % BEGINNINGS] + [draw.randrange(128_000) for _ in range(OWN_BLOCKS * STEP)])
        for i in range(count)
    ]


def run_store(sequences: list[Tokens], max_blocks: int) -> tuple[float, int]:
    """Microseconds per block of match and insert, and the tokens matched in all."""
    block_bytes = STEP * SMALL.tensors * SMALL.row_bytes
    store = PrefixStore(SMALL, StoreConfig(tokens_per_block=STEP, max_bytes=max_blocks * block_bytes))
    rows = GroupRows([np.zeros((SMALL.tensors, len(sequences[0]), SMALL.head_dim), np.uint8)])
    began = time.perf_counter_ns()
    for tokens in sequences:
        store.match(tokens)
        store.insert(tokens, rows)
    return per_block(began, sequences), store.stats.tokens_saved


def run_list(sequences: list[Tokens]) -> tuple[float, int]:
    """The same for a list that is scanned."""
    known: list[Tokens] = []
    saved = 0
    began = time.perf_counter_ns()
    for tokens in sequences:
        best = 0
        for other in known:
            count = 0
            for one, two in zip(tokens, other, strict=True):
                if one != two:
                    break
                count += 1
            best = max(best, count)
        saved += best
        known.append(tokens)
    return per_block(began, sequences), saved


def per_block(began: int, sequences: list[Tokens]) -> float:
    return (time.perf_counter_ns() - began) / 1e3 / (len(sequences) * (SHARED_BLOCKS + OWN_BLOCKS))


def throughput(count: int, naive: int) -> Table:
    table = Table(title=f"match + insert, {SHARED_BLOCKS + OWN_BLOCKS} blocks of {STEP} tokens a sequence")
    for column in ("store", "sequences", "us per block", "tokens saved"):
        table.add_column(column, justify="left" if column == "store" else "right")
    sequences = make_sequences(count)
    few, all_blocks = sequences[:naive], count * (SHARED_BLOCKS + OWN_BLOCKS)
    for name, used, (us, saved) in (
        ("list scan", few, run_list(few)),
        ("prefix store", few, run_store(few, all_blocks)),
        ("prefix store", sequences, run_store(sequences, all_blocks)),
        ("prefix store, a tenth of the room", sequences, run_store(sequences, all_blocks // 10)),
    ):
        table.add_row(name, f"{len(used):,}", f"{us:.2f}", f"{saved:,}")
    return table


def restore(tokens: int, rounds: int = 15) -> Table:
    geometry, row_bytes = LLAMA_1B, LLAMA_1B.tensors * LLAMA_1B.row_bytes
    sequence = tuple(range(tokens))
    plain = np.full((geometry.tensors, tokens, geometry.head_dim), 7, np.uint8)
    copy = np.zeros_like(plain)
    arena = np.zeros((geometry.tensors, 2 * geometry.context, geometry.head_dim), np.uint8)
    store = PrefixStore(geometry, StoreConfig(tokens_per_block=STEP, max_tokens=tokens + STEP))
    store.insert(sequence, GroupRows([plain]))

    def fetch() -> int:
        match = store.match(sequence)
        store.restore(match, GroupRows([arena[:, 100 : 100 + match.tokens]]))
        return match.tokens * row_bytes

    def memcpy() -> int:
        copy[...] = plain
        return plain.nbytes

    blocks = store.match(sequence).rows[0]

    def copy_blocks() -> int:
        for number, block in enumerate(blocks):
            arena[:, 100 + number * STEP : 100 + (number + 1) * STEP] = block
        return len(blocks) * STEP * row_bytes

    def speed(call: Callable[[], int]) -> float:
        began = time.perf_counter_ns()
        moved = call()
        return moved / (time.perf_counter_ns() - began)

    calls = {"memcpy": memcpy, "blocks, without the store": copy_blocks, "match + restore": fetch}
    speeds = by_turns({name: partial(speed, call) for name, call in calls.items()}, rounds)
    table = Table(
        title=f"restoring {tokens:,} tokens, {tokens * row_bytes / 2**20:.0f} MiB (16 layers, 8 heads, D = 64)"
    )
    for column in ("copy", "GB/s", "of memcpy"):
        table.add_column(column, justify="left" if column == "copy" else "right")
    base = statistics.median(speeds["memcpy"])
    for name, measured in speeds.items():
        table.add_row(name, f"{statistics.median(measured):.2f}", f"{statistics.median(measured) / base:.2f}")
    return table


def folder_times(sequences: int, foreign_blocks: int) -> Table:
    """Milliseconds of a match after blocks of another process, and of a listing."""
    draw = random.Random(0)
    context = 4096
    rows = GroupRows([np.zeros((SMALL.tensors, context, SMALL.head_dim), np.uint8)])

    def opened(folder: str) -> PrefixStore:
        return PrefixStore(SMALL, StoreConfig(disk_folder=Path(folder)), fingerprint="benchmark")

    def save(store: PrefixStore, tokens: int, count: int) -> Tokens:
        for _ in range(count):
            last = tuple(draw.randrange(128_000) for _ in range(tokens))
            store.insert(last, rows)
        store.save()
        return last

    def milliseconds(call: Callable[[], object]) -> float:
        began = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - began) / 1e6

    times: dict[str, list[float]] = {"match of none of them": [], "match of 512 tokens of them": []}
    with TemporaryDirectory() as folder:
        one, other = opened(folder), opened(folder)
        for _ in range(5):
            found = save(one, 512, foreign_blocks // 16)
            times["match of none of them"].append(milliseconds(partial(other.match, tuple(range(512)))))
            save(one, 512, foreign_blocks // 16)
            times["match of 512 tokens of them"].append(milliseconds(partial(other.match, found)))
    with TemporaryDirectory() as folder:
        save(opened(folder), context, sequences)
        times[f"list {sequences} sequences of {context:,} tokens"] = [
            milliseconds(partial(stored_prefixes, Path(folder))) for _ in range(5)
        ]
    table = Table(title=f"a folder, after {foreign_blocks:,} blocks of another process")
    table.add_column("call")
    table.add_column("ms", justify="right")
    for name, each in times.items():
        table.add_row(name, f"{statistics.median(each):.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--naive", type=int, default=1_000, help="sequences for the list scan")
    parser.add_argument("--tokens", type=int, default=2_000, help="tokens of the restored prefix")
    parser.add_argument("--listed", type=int, default=100, help="sequences of the listed folder")
    parser.add_argument("--foreign-blocks", type=int, default=2_000, help="blocks that another process saves")
    args = parser.parse_args()
    console = Console()
    console.print(throughput(args.sequences, args.naive))
    console.print(restore(args.tokens))
    console.print(folder_times(args.listed, args.foreign_blocks))


if __name__ == "__main__":
    main()
