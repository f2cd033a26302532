"""Time of one call of paged attention: the vectorized operator against a loop over tokens.

    python -m benchmarks.paged_attention [--repeats 5]

32 query heads on 8 KV heads of 64 elements, 16 tokens to a block, float32: one layer of Llama-3.2-1B. For each new
token the loop finds the blocks of all that it sees, gathers them, and attends one head after another, in float32;
the operator computes in float64. A decode step is one token of a sequence, so there only its heads are left to
vectorize. Both take turns, so that a change of the machine's speed meets both; the median is shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from edgekv.paged import paged_attention

HEADS, KV_HEADS, SIZE, BLOCK_TOKENS = 32, 8, 64, 16
LOADS = {
    "decode on 512": [(512, 1)],
    "decode on 2,048": [(2048, 1)],
    "8 x decode on 512": [(512, 1)] * 8,
    "prefill of 512": [(0, 512)],
    "prefill of 128 on 1,024": [(1024, 128)],
    "7 x decode, prefill of 256": [*[(512, 1)] * 7, (0, 256)],
}


@dataclass(frozen=True, slots=True)
class Load:
    """The operator's inputs for sequences of (cached, new) tokens."""

    query: NDArray[np.float32]
    key: NDArray[np.float32]
    value: NDArray[np.float32]
    key_cache: NDArray[np.float32]
    value_cache: NDArray[np.float32]
    past_lens: NDArray[np.int32]
    subsequence_begins: NDArray[np.int32]
    block_indices: NDArray[np.int32]
    block_indices_begins: NDArray[np.int32]

    @classmethod
    def of(cls, sequences: list[tuple[int, int]]) -> Load:
        rng = np.random.default_rng(0)
        past, new = (np.array(counts) for counts in zip(*sequences, strict=True))
        blocks = -(-(past + new) // BLOCK_TOKENS)
        shapes = [(new.sum(), heads * SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        shapes += [(blocks.sum(), KV_HEADS, BLOCK_TOKENS, SIZE)] * 2
        begins = [np.cumsum([0, *counts]).astype(np.int32) for counts in (new, blocks)]
        floats = (rng.standard_normal(shape, np.float32) for shape in shapes)
        return cls(*floats, past.astype(np.int32), begins[0], rng.permutation(blocks.sum()).astype(np.int32), begins[1])

    def vectorized(self) -> NDArray[np.float32]:
        return paged_attention(
            self.query,
            self.key,
            self.value,
            self.key_cache,
            self.value_cache,
            self.past_lens,
            self.subsequence_begins,
            self.block_indices,
            self.block_indices_begins,
        )[0]

    def naive(self) -> NDArray[np.float32]:
        output = np.empty((len(self.query), HEADS, SIZE), np.float32)
        for s, past in enumerate(self.past_lens):
            table = self.block_indices[self.block_indices_begins[s] :]
            for at, row in enumerate(range(self.subsequence_begins[s], self.subsequence_begins[s + 1]), past):
                block, slot = table[at // BLOCK_TOKENS], at % BLOCK_TOKENS
                self.key_cache[block, :, slot] = self.key[row].reshape(KV_HEADS, SIZE)
                self.value_cache[block, :, slot] = self.value[row].reshape(KV_HEADS, SIZE)
                seen = np.arange(at + 1)
                keys = self.key_cache[table[seen // BLOCK_TOKENS], :, seen % BLOCK_TOKENS]
                values = self.value_cache[table[seen // BLOCK_TOKENS], :, seen % BLOCK_TOKENS]
                for head in range(HEADS):
                    kv_head = head // (HEADS // KV_HEADS)
                    query = self.query[row, head * SIZE : (head + 1) * SIZE]
                    logits = keys[:, kv_head] @ query / np.float32(SIZE**0.5)
                    weights = np.exp(logits - logits.max())
                    output[row, head] = weights / weights.sum() @ values[:, kv_head]
        return output.reshape(len(self.query), -1)


def seconds(run: Callable[[], NDArray[np.float32]]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    table = Table(title=f"paged attention, {HEADS} heads on {KV_HEADS} of {SIZE}, {BLOCK_TOKENS} tokens to a block")
    for column in ("batch", "loop ms", "operator ms", "faster", "difference"):
        table.add_column(column, justify="left" if column == "batch" else "right")
    for name, sequences in LOADS.items():
        load = Load.of(sequences)
        difference = np.abs(load.vectorized() - load.naive()).max()
        turns = [(seconds(load.naive), seconds(load.vectorized)) for _ in range(args.repeats)]
        loop, vectorized = (statistics.median(times) * 1e3 for times in zip(*turns, strict=True))
        table.add_row(
            name,
            f"{loop:.1f}",
            f"{vectorized:.2f}",
            f"{loop / vectorized:.1f} x",
            f"{difference:.1e}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
