"""Host time of a decode step outside of the runtime's own run, for each update strategy.

    python -m benchmarks.host_step [--tensors 256 512] [--steps 200]

Runs a real exported decoder of random weights with that many cache tensors (each a past input and a new output).
`naive` is what a plain loop does: run on numpy arrays, concatenate past and new, drop the oldest row. Strategies
take turns, so that a change of the machine's speed meets all of them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from devices import find
from edgekv.bundle import open_bundle
from edgekv.engine import CpuEngine, Runner
from edgekv.kv import KVCache
from exporters.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.recipe import find_recipe
from tests.checkpoints import NEWER, write_checkpoint

CONTEXT, HEAD_DIM, KV_HEADS = 1024, 64, 8
STRATEGIES = (("slot", 2.0), ("pointer-shift", 2.0), ("pointer-shift", 1.5))


def export(folder: Path, tensors: int) -> Path:
    """A bundle with this many cache tensors; its layers compute as little as a decoder can."""
    shape = {
        "num_hidden_layers": tensors // (2 * KV_HEADS),
        "num_attention_heads": KV_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
    }
    checkpoint = Checkpoint.open(str(write_checkpoint(folder / "checkpoint", NEWER, shape)))
    options = ExportOptions(
        device=find("SM8650"), recipe=find_recipe("w8a16"), context=CONTEXT, ar=(1,), check_on_htp=False
    )
    export_bundle(checkpoint, folder / "bundle", options)
    return folder / "bundle"


def bound(folder: Path, strategy: str, reserve: float) -> Callable[[], float]:
    """A function that runs one step and returns its host time in microseconds."""
    bundle = open_bundle(folder)
    cache = KVCache(bundle.manifest.geometry, ar=(1,), strategy=strategy, reserve=reserve)
    runner = Runner(bundle, CpuEngine(threads=1), cache)

    def step() -> float:
        before = runner.times.host_ns
        runner.feed([1])
        return (runner.times.host_ns - before) / 1e3

    return step


def naive(folder: Path) -> Callable[[], float]:
    """The same for a loop that copies the whole cache; inputs other than the cache stay as they are."""
    bundle = open_bundle(folder)
    geometry = bundle.manifest.geometry
    session = CpuEngine(threads=1).session(bundle.graph_path(bundle.manifest.graphs[0]))
    types = {"tensor(int32)": np.int32, "tensor(uint16)": np.uint16, "tensor(uint8)": np.uint8}
    feeds = {port.name: np.zeros(port.shape, types[port.type]) for port in session.get_inputs()}
    names = [port.name for port in session.get_outputs()]

    def step() -> float:
        new = dict(zip(names, session.run(names, feeds), strict=True))
        began = time.perf_counter_ns()
        for tensor in geometry.names():
            feeds[tensor.past] = np.concatenate((feeds[tensor.past], new[tensor.new]), axis=2)[:, :, 1:]
        return (time.perf_counter_ns() - began) / 1e3

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[256, 512], help="cache tensors, multiples of 16")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    table = Table(title=f"host time of a decode step, S = {CONTEXT}, D = {HEAD_DIM}, uint8, microseconds")
    for column in ("tensors", "strategy", "median", "90 %", "naive / this"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for tensors in args.tensors:
        with tempfile.TemporaryDirectory() as scratch:
            folder = export(Path(scratch), tensors)
            loops = {"naive": naive(folder)}
            loops |= {f"{name} {reserve}": bound(folder, name, reserve) for name, reserve in STRATEGIES}
            times: dict[str, list[float]] = {name: [] for name in loops}
            for _ in range(args.steps):
                for name, step in loops.items():
                    times[name].append(step())
        base = statistics.median(times["naive"])
        for name, measured in times.items():
            median, late = statistics.median(measured), statistics.quantiles(measured, n=10)[-1]
            table.add_row(str(tensors), name, f"{median:.1f}", f"{late:.1f}", f"{base / median:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
