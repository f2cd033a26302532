"""Host time of a decode step outside the runtime, for each update strategy.

    python -m benchmarks.host_step [--tensors 256 512] [--steps 200]
    python -m benchmarks.host_step --states [--whole] [--strategies slot mirror] [--steps 200]

Runs a real exported decoder of random weights with that many cache tensors (each a past input and a new output),
and a graph with the same inputs and outputs that only slices them: the decoder leaves the processor's caches cold,
the slices leave them warm.
`naive` is what a plain loop does: run on numpy arrays, concatenate past and new, drop the oldest row. Each cache starts
empty, and a pointer-shift slides only after 512 steps or more: `benchmarks.kv_update` counts slides too.

With `--states`, eight layers of small models behind their decoders: attention alone, and gated delta rules or short
convolutions in six of them. With `--whole`, the caches of Qwen3-0.6B and Qwen3.5-0.8B: all layers, heads and
channels, behind a narrow residual.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper
from rich.console import Console

import edgekv
from benchmarks.large_checkpoint import write_large_checkpoint
from benchmarks.turns import by_turns, turns_table
from devices import find
from edgekv.bundle import Bundle, open_bundle
from edgekv.kv import STRATEGIES as UPDATES, KVCache, StrategyName
from edgekv.runtime import CpuEngine, StaticGraph
from edgekv.runtime.binding import MemoryBinding
from edgekv.runtime.graph import HostTables, rope_tables
from edgekv.spec import Port
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.quantize.recipe import find_recipe

CONTEXT, HEAD_DIM, KV_HEADS = 1024, 64, 8
TURN = 10
STRATEGIES = (("slot", 2.0), ("pointer-shift", 2.0), ("pointer-shift", 1.5), ("mirror", 2.0), ("shift-concat", 2.0))


def export(folder: Path, tensors: int) -> Path:
    """A bundle with this many cache tensors; its layers compute as little as a decoder can."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 4096,
        "num_hidden_layers": tensors // (2 * KV_HEADS),
        "num_attention_heads": KV_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
    }
    checkpoint = Checkpoint.open(str(write_large_checkpoint(folder / "checkpoint", "smollm2-135m", shape)))
    options = ExportOptions(
        device=find("SM8650"), recipe=find_recipe("w8a16"), context=CONTEXT, ar=(1,), check_on_htp=False
    )
    export_bundle(checkpoint, folder / "bundle", options)
    return folder / "bundle"


def slices(bundle: Bundle) -> ort.InferenceSession:
    """The decode graph's inputs and outputs with nothing but a slice between past and new rows."""
    interface = bundle.manifest.interface.graph(bundle.manifest.graphs[0])
    elements = {"int32": TensorProto.INT32, "uint16": TensorProto.UINT16, "uint8": TensorProto.UINT8}

    def infos(ports: tuple[Port, ...]) -> list[ValueInfoProto]:
        return [helper.make_tensor_value_info(port.name, elements[port.dtype], port.shape) for port in ports]

    ends = [helper.make_tensor(name, TensorProto.INT64, [1], [value]) for name, value in (("0", 0), ("1", 1), ("2", 2))]
    logits = numpy_helper.from_array(np.zeros(interface.exit.shape, np.uint16), "zeros")
    nodes = [helper.make_node("Identity", ["zeros"], ["logits"])]
    for tensor in bundle.manifest.geometry.names():
        nodes.append(helper.make_node("Slice", [tensor.past, "0", "1", "2"], [tensor.new]))
    graph = helper.make_graph(nodes, "slices", infos(interface.inputs), infos(interface.outputs), [*ends, logits])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def bound(bundle: Bundle, session: ort.InferenceSession, strategy: str, reserve: float) -> Callable[[], float]:
    """A function that runs one step and returns its host time in microseconds."""
    manifest = bundle.manifest
    cache = KVCache(manifest.geometry, ar=(1,), strategy=strategy, reserve=reserve, policy="sliding-window")
    tables = HostTables(rope_tables(manifest))
    graph = StaticGraph([MemoryBinding(session)], manifest, manifest.graphs[0], cache, tables)

    def step() -> float:
        ran, began = graph.clock.run_ns, perf_counter_ns()
        windows = graph.window(1)
        graph.run([1], windows, cache.position)
        cache.commit(1)
        return (perf_counter_ns() - began - (graph.clock.run_ns - ran)) / 1e3

    return step


def naive(bundle: Bundle, session: ort.InferenceSession) -> Callable[[], float]:
    """The same for a loop that copies the whole cache; inputs other than the cache stay as they are."""
    geometry = bundle.manifest.geometry
    ports = bundle.manifest.interface.graph(bundle.manifest.graphs[0]).inputs
    feeds = {port.name: np.zeros(port.shape, port.dtype) for port in ports}
    names = [port.name for port in session.get_outputs()]

    def step() -> float:
        new = dict(zip(names, session.run(names, feeds), strict=True))
        began = time.perf_counter_ns()
        for tensor in geometry.names():
            feeds[tensor.past] = np.concatenate((feeds[tensor.past], new[tensor.new]), axis=2)[:, :, 1:]
        return (time.perf_counter_ns() - began) / 1e3

    return step


LAYERS = {"num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 4096}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("qwen3-0.6b", HEADS),
    "convolutions": (
        "lfm2-350m",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "block_ff_dim": 256, "full_attn_idxs": [2, 5]},
    ),
    "delta rules": (
        "qwen3.5-0.8b",
        {
            **HEADS,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
}


NARROW = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 4096}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("qwen3-0.6b", NARROW),
    "delta rules": ("qwen3.5-0.8b", NARROW),
}


def measure_states(
    folder: Path, steps: int, strategies: Sequence[StrategyName], *, whole: bool
) -> dict[str, list[float]]:
    """Microseconds of every decode step, by the kind of most layers; the text restarts before the context is full."""
    options = ExportOptions(
        device=find("SM8650"),
        recipe=find_recipe("w8a16"),
        context=256,
        ar=(1, 32),
        calibration_tokens=1024,
        check_on_htp=False,
        check_quality=False,
    )
    turns = {}
    kinds = WHOLE if whole else {name: (shape, LAYERS | changes) for name, (shape, changes) in KINDS.items()}
    for name, (shape, changes) in kinds.items():
        checkpoint = Checkpoint.open(str(write_large_checkpoint(folder / name, shape, changes)))
        export_bundle(checkpoint, folder / f"{name}.bundle", options)
        for strategy in strategies:
            model = edgekv.load(folder / f"{name}.bundle", threads=1, kv_update=strategy)
            turns[f"{name}, {strategy}"] = partial(_decode, model)
    return {name: [*chain.from_iterable(found)] for name, found in by_turns(turns, steps // TURN).items()}


def _decode(model: edgekv.Model) -> list[float]:
    session, clock, found = model.session, model.engine.graphs.clock, list[float]()
    if session.cache.tokens_seen > 128:
        session.reset()
    for _ in range(TURN):
        before = clock.host_ns
        session.feed([1])
        found.append((clock.host_ns - before) / 1e3)
    return found


def measure(bundle: Bundle, session: ort.InferenceSession, steps: int) -> dict[str, list[float]]:
    """Microseconds of every step, by strategy."""
    loops = {"naive": naive(bundle, session)}
    for name, reserve in STRATEGIES:
        label = f"{name} {reserve}" if name == "pointer-shift" else name
        loops[label] = bound(bundle, session, name, reserve)
    turns = {name: partial(_several, step) for name, step in loops.items()}
    return {name: [*chain.from_iterable(found)] for name, found in by_turns(turns, steps // TURN).items()}


def _several(step: Callable[[], float]) -> list[float]:
    return [step() for _ in range(TURN)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[256, 512], help="cache tensors, multiples of 16")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--states", action="store_true", help="compare layers with states and without")
    parser.add_argument("--whole", action="store_true", help="with --states: caches of whole models")
    parser.add_argument("--strategies", nargs="+", default=["slot"], choices=UPDATES, help="with --states")
    args = parser.parse_args()
    if args.states:
        with tempfile.TemporaryDirectory() as scratch:
            title = f"host time of a decode step of {'whole models' if args.whole else 'eight layers'}, microseconds"
            found = measure_states(Path(scratch), args.steps, args.strategies, whole=args.whole)
            Console(width=100).print(turns_table(title, found, f"attention, {args.strategies[0]}"))
        return
    for tensors in args.tensors:
        with tempfile.TemporaryDirectory() as scratch:
            bundle = open_bundle(export(Path(scratch), tensors))
            decoder = CpuEngine(threads=1).session(bundle.graph_path(bundle.manifest.graphs[0]))
            for graph, session in (("decoder", decoder), ("slices", slices(bundle))):
                title = (
                    f"host time of a step of {graph}, {tensors} tensors, S = {CONTEXT}, D = {HEAD_DIM}, microseconds"
                )
                Console(width=100).print(turns_table(title, measure(bundle, session, args.steps), "naive"))


if __name__ == "__main__":
    main()
