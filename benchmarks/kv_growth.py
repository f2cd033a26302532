"""Memory of a generation with a cache that grows from context to context, against one of the largest context.

    python -m benchmarks.kv_growth [--layers 32] [--kv-heads 8] [--head-dim 128] [--contexts 512 1024 2048 4096]

A text of single-token steps fills the largest context, without a graph. The excess is the peak minus the final size:
outgrown memory is kept until the step ends.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from edgekv.kv import GROWTHS, Allocation, Growth, GrowthName, KVCache, RowSpec

MEBIBYTE = 1 << 20


def run(geometry: RowSpec, contexts: tuple[int, ...], name: GrowthName | None) -> tuple[list[int], KVCache]:
    """Bytes held when each context is half full, and the cache at the end."""
    cache = KVCache(geometry, ar=[1], strategy="slot", allocation=Allocation(name and Growth(contexts, name)))
    held = []
    for token in range(contexts[-1]):
        cache.window(1, next(context for context in contexts if context > token))
        cache.commit(1)
        if token + 1 in [context // 2 for context in contexts]:
            held.append(cache.stats.bytes_held)
    return held, cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    options = parser.parse_args()
    contexts = tuple(sorted(set(options.contexts)))
    geometry = RowSpec(options.layers, options.kv_heads, options.head_dim, contexts[-1])
    halves = [f"at {context // 2}" for context in contexts]
    table = Table("growth", *halves, "end", "peak", "excess", "reallocations", "copied by them", title="MiB")
    appended = contexts[-1] * geometry.tensors * geometry.row_bytes
    for name in (None, *GROWTHS):
        held, cache = run(geometry, contexts, name)
        stats = cache.stats
        sizes = [*held, stats.bytes_held, stats.peak_bytes, stats.peak_bytes - stats.bytes_held]
        cells = [f"{size / MEBIBYTE:.1f}" for size in sizes]
        copied = f"{(stats.bytes_copied - appended) / MEBIBYTE:.1f}"
        table.add_row(name or "all at once", *cells, str(stats.reallocations), copied)
    Console().print(table)


if __name__ == "__main__":
    main()
