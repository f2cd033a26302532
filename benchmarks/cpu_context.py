"""The cost of a decode step against the tokens held, in the CPU engine and in onnxruntime-genai.

    pip install onnxruntime-genai matplotlib
    python -m benchmarks.cpu_context --bundle DIR [--modes exact16,fast] [--steps 30] [--threads N] [--plot FILE.svg]

The bundle's decode graph of the largest context holds 128, 256, ... tokens, until its context is full. Steps alternate
in one process, as in `benchmarks.cpu_decode`, which also tells where the graph of onnxruntime-genai comes from.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cpu_decode import BundleDecoder, Contender, GenaiDecoder, loaded, spec_of, take_turns
from benchmarks.genai_graph import write_genai_folder
from edgekv.bundle import Bundle, GraphRecord, open_bundle
from edgekv.runtime import CPU_MODES, CpuEngine

_LEAST_TOKENS = 128
_PEER = "onnxruntime-genai, int4"

_Medians = dict[str, list[float]]  # milliseconds for each number of tokens


def contenders_of(bundle: Bundle, record: GraphRecord, args: argparse.Namespace, folder: Path) -> list[Contender[Any]]:
    """The graph in every mode asked for, then onnxruntime-genai if it is installed; all hold the least tokens."""
    found: list[Contender[Any]] = []
    for mode in (each for each in CPU_MODES if each in args.modes.split(",")):
        engine = CpuEngine(args.threads, mode)
        load = partial(lambda path, engine: engine.load(path, path.stem), engine=engine)
        found.append(loaded(mode, partial(BundleDecoder, bundle, load, record, _LEAST_TOKENS)))
    if find_spec("onnxruntime_genai") is None:
        print("onnxruntime-genai is not installed: no comparison with it")
        return found
    vocab = bundle.manifest.model.vocab
    model = args.genai or write_genai_folder(spec_of(bundle), record.context, folder)
    peer = partial(GenaiDecoder, model, record.context, vocab, args.threads, _LEAST_TOKENS)
    return [*found, loaded(_PEER, peer)]


def measure(contenders: list[Contender[Any]], held: Sequence[int], steps: int) -> _Medians:
    """The median step of every contender at each number of tokens."""
    medians: _Medians = {each.name: [] for each in contenders}
    for tokens in held:
        for each in contenders:
            each.decoder.hold(tokens)
            each.times_ms.clear()
        take_turns(contenders, steps)
        for each in contenders:
            medians[each.name].append(statistics.median(each.times_ms))
    return medians


def show(held: Sequence[int], medians: _Medians) -> None:
    table = Table(title="a decode step, milliseconds (x onnxruntime-genai)")
    table.add_column("tokens held", justify="right")
    for name in medians:
        table.add_column(name, justify="right")
    for row, tokens in enumerate(held):
        times = {name: found[row] for name, found in medians.items()}
        base = times.get(_PEER)
        cells = [f"{each:.1f}" + (f" ({base / each:.2f})" if base else "") for each in times.values()]
        table.add_row(str(tokens), *cells)
    Console(width=110).print(table)


def save_plot(held: Sequence[int], medians: _Medians, file: Path) -> None:
    """Draw the steps over the tokens held; the suffix of the file selects the format."""
    from matplotlib.figure import Figure  # an extra

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for name, found in medians.items():
        axes.plot(held, found, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(held, [str(each) for each in held])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens held")
    axes.set_ylabel("median decode step (ms)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--modes", default="exact16,fast")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--genai", type=Path, help="a folder of its model builder")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    bundle = open_bundle(args.bundle)
    graphs = [graph for graph in bundle.manifest.graphs if graph.role == "decode"]
    record = max(graphs, key=lambda graph: graph.context)
    room = record.context - 2 * args.steps  # each turn has a step that is not measured
    held = [tokens for power in range(20) if (tokens := _LEAST_TOKENS << power) <= room]
    if room > held[-1] * 1.5:
        held.append(room)
    with tempfile.TemporaryDirectory() as scratch:
        contenders = contenders_of(bundle, record, args, Path(scratch))
        medians = measure(contenders, held, args.steps)
    show(held, medians)
    if args.plot is not None:
        save_plot(held, medians, args.plot)


if __name__ == "__main__":
    main()
