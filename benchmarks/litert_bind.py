"""Host time to give LiteRT and tflite-runtime the past and take the new rows, a decode step: bound, and copied.

    python -m benchmarks.litert_bind [--tensors 16 256] [--context 1024] [--steps 300]

Uses a decoder of random weights with that many cache tensors, exported as TFLite graphs.
`pointer-shift` moves the windows of all cache tensors by one row, and includes what the runtime does to take the new
addresses over. `slot` was bound once, and writes the new rows into the cache. `copied` is what the runtimes' public
Python interface does: the past written into the runtime's memory, the new rows read out of it; keeping the past
together costs such a loop one more copy, which is not counted. All take turns, so that a change of the machine's speed
meets all.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from devices import find
from edgekv.bundle import Bundle, open_bundle
from edgekv.kv import KVCache, Window
from edgekv.runtime import LitertEngine, TfliteEngine
from edgekv.runtime.binding import aligned_zeros
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.quantize.recipe import find_recipe
from tests.checkpoints import NEWER, write_checkpoint

HEAD_DIM, KV_HEADS, TURN = 64, 8, 10


def export(folder: Path, tensors: int, context: int) -> Bundle:
    """A bundle with this many cache tensors."""
    shape = {
        "num_hidden_layers": tensors // (2 * KV_HEADS),
        "num_attention_heads": KV_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context,
    }
    checkpoint = Checkpoint.open(str(write_checkpoint(folder / "checkpoint", NEWER, shape)))
    options = ExportOptions(
        device=find("SM8650"),
        recipe=find_recipe("w8a16"),
        context=context,
        ar=(1,),
        kv_dtype="s8",
        graph_format="tflite",
    )
    export_bundle(checkpoint, folder / "bundle", options)
    return open_bundle(folder / "bundle")


def bound(bundle: Bundle, engine: LitertEngine | TfliteEngine) -> Callable[[], None]:
    """A function that binds the window of the next step."""
    manifest = bundle.manifest
    record = manifest.graphs[0]
    binding = engine.load(bundle.graph_path(record), record.name)
    for port in binding.interface.inputs:
        array = aligned_zeros(port.shape, port.dtype)
        binding.inputs([port.name], array.dtype, array.shape, [array.ctypes.data])
        kept.append(array)
    cache = KVCache(manifest.geometry, ar=(1,), strategy="pointer-shift", policy="sliding-window")
    (store,) = cache.arenas
    past_names = [tensor.past for tensor in store.tensors]
    new_names = [tensor.new for tensor in store.tensors]
    past_shape, new_shape = store.past_shape(manifest.context - 1), store.new_shape(1)
    columns = manifest.context - 1
    windows = [
        Window(1, columns, row, row + columns, in_place=True, first=0, stop=0) for row in range(manifest.context // 2)
    ]
    turn = 0

    def step() -> None:
        nonlocal turn
        window = windows[turn % len(windows)]
        turn += 1
        past, new = store.past_offset_bytes(window), store.new_offset_bytes(window)
        binding.inputs(past_names, store.dtype, past_shape, store.addresses, past)
        binding.outputs(new_names, store.dtype, new_shape, store.new_addresses(window), new)
        if hasattr(binding, "lay_out"):
            binding.lay_out()

    return step


def fixed(bundle: Bundle) -> Callable[[], None]:
    """A function that opens and commits a step on memory that stays where it is."""
    cache = KVCache(bundle.manifest.geometry, ar=(1,), strategy="slot", policy="sliding-window")

    def step() -> None:
        cache.window(1)
        cache.commit(1)

    return step


def copied(bundle: Bundle, engine: LitertEngine | TfliteEngine) -> Callable[[], None]:
    """A function that copies the past into the runtime and new rows out of it."""
    record = bundle.manifest.graphs[0]
    tensors = list(bundle.manifest.geometry.names())
    past = np.zeros((len(tensors), 1, 1, bundle.manifest.context - 1, HEAD_DIM), np.int8)
    interpreter = _interpreter(engine)(str(bundle.graph_path(record)), num_threads=1)
    runner = interpreter.get_signature_runner(record.name)
    subgraph, runtime = runner._subgraph_index, interpreter._interpreter
    runtime.AllocateTensors(subgraph)
    inputs, outputs = runner.get_input_details(), runner.get_output_details()
    places = [(inputs[tensor.past]["index"], outputs[tensor.new]["index"]) for tensor in tensors]

    def step() -> None:
        for rows, (past_index, new_index) in zip(past, places, strict=True):
            runtime.SetTensor(past_index, rows, subgraph)
            runtime.GetTensor(new_index, subgraph)

    kept.append(interpreter)
    return step


def _interpreter(engine: LitertEngine | TfliteEngine) -> Any:
    if engine.name == "litert":
        from ai_edge_litert.interpreter import Interpreter
    else:
        from tflite_runtime.interpreter import Interpreter
    return Interpreter


kept: list[Any] = []  # memory that the runtimes were given


def measure(bundle: Bundle, engine: LitertEngine | TfliteEngine, steps: int) -> dict[str, list[float]]:
    """Microseconds of every step, by way."""
    ways = {"copied": copied(bundle, engine), "pointer-shift": bound(bundle, engine), "slot": fixed(bundle)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(steps // TURN):
        for name, step in ways.items():
            for _ in range(TURN):
                began = time.perf_counter_ns()
                step()
                times[name].append((time.perf_counter_ns() - began) / 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[16, 256], help="cache tensors, multiples of 16")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    table = Table(title=f"host time a step, S = {args.context}, D = {HEAD_DIM}, int8, microseconds")
    for column in ("tensors", "runtime", "way", "median", "90 %", "copied / this"):
        table.add_column(column, justify="left" if column in ("runtime", "way") else "right")
    for tensors in args.tensors:
        with tempfile.TemporaryDirectory() as scratch:
            bundle = export(Path(scratch), tensors, args.context)
            for engine in (LitertEngine(1), TfliteEngine(1)):
                times = measure(bundle, engine, args.steps)
                base = statistics.median(times["copied"])
                for name, measured in times.items():
                    median, late = statistics.median(measured), statistics.quantiles(measured, n=10)[-1]
                    row = (f"{median:.1f}", f"{late:.1f}", f"{base / median:.1f}")
                    table.add_row(str(tensors), engine.name, name, *row)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
