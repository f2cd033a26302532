"""A decode step of the CPU engine in every mode, beside the same decoder in float32 and in onnxruntime-genai.

    pip install onnxruntime-genai
    python -m benchmarks.cpu_decode [--checkpoint DIR] [--context 1024] [--steps 80] [--threads N] [--genai DIR]
    python -m benchmarks.cpu_decode --bundle DIR [--bundle DIR ...]

Without `--checkpoint`, random weights of SmolLM2-135M's shape; `--bundle` measures bundles as they are, each context
of theirs. All graphs alternate in one process, so that changes of the machine's speed affect all; the first step of a
turn is not counted. `node by node` is the bundle's graph as exported, which must give the same bits as the CPU engine
in `emulate`; `float32` is a plain ONNX graph of the same decoder with the same inputs and outputs, keys and values in
float. onnxruntime-genai runs int4 weights: the graph of `benchmarks.genai_graph`, or with `--genai` a folder of its
model builder (`-p int4 -e cpu`). All loops hold half a context of tokens, except `float32`, which
always reads all of it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

from benchmarks.float_graph import write_float_graph
from benchmarks.genai_graph import write_genai_folder
from benchmarks.quantization import rounded_to_nearest
from devices import find
from edgekv.bundle import Bundle, GraphRecord, open_bundle
from edgekv.kv import KVCache
from edgekv.runtime import CPU_MODES, CpuEngine, StaticGraph
from edgekv.runtime.binding import Binding, MemoryBinding
from edgekv.runtime.rope import rope_tables
from edgekv.spec import DecoderSpec
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.quantize.recipe import find_recipe
from tests.checkpoints import NEWER, write_checkpoint

RECIPES = ("w8a16", "w4a16-lpbq64")
SMOLLM2_135M: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}
TURN = 5


class Decoder(Protocol):
    def step(self) -> None:
        """Decode one token."""


D = TypeVar("D", bound=Decoder)


@dataclass(slots=True)
class Contender(Generic[D]):
    """A loaded decoder and its measurements.

    Attributes:
        name: for the table.
        decoder: takes steps.
        load_s: time to load it.
        times_ms: of each step.
    """

    name: str
    decoder: D
    load_s: float
    times_ms: list[float] = field(default_factory=list)


class BundleDecoder:
    """The decode graph of a bundle behind a number of zeros; None for half a context."""

    def __init__(
        self,
        bundle: Bundle,
        load: Callable[[Path], Binding],
        record: GraphRecord | None = None,
        held: int | None = None,
    ) -> None:
        manifest = bundle.manifest
        record = record or manifest.graphs[0]
        geometry = replace(manifest.geometry, context=record.context)
        self._cache = cache = KVCache(geometry, ar=(1,), strategy="slot", policy="sliding-window")
        self.hold(record.context // 2 if held is None else held)
        self.graph = StaticGraph([load(bundle.graph_path(record))], manifest, record, cache, rope_tables(manifest))

    def hold(self, tokens: int) -> None:
        """Hold at least this many tokens."""
        while self._cache.length < tokens:
            self._cache.window(1)
            self._cache.commit(1)

    def step(self) -> None:
        self.graph.step([1])


class FloatDecoder:
    """The float32 graph on random inputs, always the same memory."""

    def __init__(self, path: Path, threads: int | None) -> None:
        self._session = CpuEngine(threads).session(path)
        self._io = self._session.io_binding()
        random = np.random.default_rng(0)
        for port in self._session.get_inputs():
            ids = port.type == "tensor(int32)"
            value = np.zeros(port.shape, np.int32) if ids else random.normal(size=port.shape).astype(np.float32)
            self._io.bind_ortvalue_input(port.name, ort.OrtValue.ortvalue_from_numpy(value))
        for port in self._session.get_outputs():
            value = np.zeros(port.shape, np.float32)
            self._io.bind_ortvalue_output(port.name, ort.OrtValue.ortvalue_from_numpy(value))

    def step(self) -> None:
        self._session.run_with_iobinding(self._io)


class GenaiDecoder:
    """onnxruntime-genai behind a number of random tokens; None for half a context."""

    def __init__(self, folder: Path, context: int, vocab: int, threads: int | None, held: int | None = None) -> None:
        import onnxruntime_genai as og  # an extra

        config = og.Config(str(folder))
        if threads is not None:
            config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {threads}}}}}}}}}')
        parameters = og.GeneratorParams(model := og.Model(config))
        parameters.set_search_options(max_length=context, min_length=context)
        self._generator = og.Generator(model, parameters)
        self._vocab = vocab
        self.hold(context // 2 if held is None else held)

    def hold(self, tokens: int) -> None:
        """Hold at least this many tokens."""
        more = tokens - int(self._generator.token_count())
        if more > 0:
            self._generator.append_tokens(np.random.default_rng(0).integers(self._vocab, size=more).astype(np.int32))

    def step(self) -> None:
        self._generator.generate_next_token()


def loaded(name: str, load: Callable[[], D]) -> Contender[D]:
    began = time.perf_counter()
    decoder = load()
    return Contender(name, decoder, time.perf_counter() - began)


def take_turns(contenders: list[Contender[Any]], steps: int) -> None:
    for _ in range(-(-steps // TURN)):
        for each in contenders:
            each.decoder.step()
            for _ in range(TURN):
                began = time.perf_counter()
                each.decoder.step()
                each.times_ms.append((time.perf_counter() - began) * 1e3)


def export(checkpoint: Checkpoint, recipe: str, context: int, folder: Path) -> Bundle:
    """A bundle of one decode graph; how its integers were chosen does not show in its speed."""
    (folder / "calibration.txt").write_text("import sys\nprint(sys.argv)\n")
    options = ExportOptions(
        device=find("SM8650"),
        recipe=rounded_to_nearest(find_recipe(recipe)),
        context=context,
        ar=(1,),
        calibration=folder / "calibration.txt",
        check_on_htp=False,
    )
    export_bundle(checkpoint, folder / recipe, options)
    return open_bundle(folder / recipe)


def assert_same_bits(fast: BundleDecoder, plain: BundleDecoder) -> None:
    """Check that both give the same logits for some tokens."""
    for token in range(8):
        for decoder in (fast, plain):
            decoder.graph.step([token])
        same = np.array_equal(fast.graph.logits, plain.graph.logits)
        assert same, f"{fast.graph.record.name}: the built graph has other bits"


def in_all_modes(name: str, bundle: Bundle, record: GraphRecord, threads: int | None) -> list[Contender[Any]]:
    """The decode graph in every mode of the engine."""
    contenders = []
    for mode in CPU_MODES:
        engine = CpuEngine(threads, mode)
        load = partial(BundleDecoder, bundle, lambda path, engine=engine: engine.load(path, path.stem), record)
        contenders.append(loaded(f"{name}, {mode}", load))
    return contenders


def genai(
    spec: DecoderSpec, context: int, threads: int | None, given: Path | None, folder: Path
) -> list[Contender[Any]]:
    """onnxruntime-genai, if it is installed."""
    if find_spec("onnxruntime_genai") is None:
        print("onnxruntime-genai is not installed: no comparison with it")
        return []
    model = given or write_genai_folder(spec, context, folder / f"genai-{context}")
    return [loaded("onnxruntime-genai, int4", lambda: GenaiDecoder(model, context, spec.vocab, threads))]


def spec_of(bundle: Bundle) -> DecoderSpec:
    """What `write_genai_folder` needs to know of a bundle's decoder."""
    return Checkpoint.open(bundle.manifest.source.checkpoint).spec


def show(title: str, contenders: list[Contender[Any]], base: Contender[Any]) -> None:
    table = Table(title=title)
    for column in ("graph", "median", "best", "speed, median", "speed, best", "tokens/s", "load s"):
        table.add_column(column, justify="left" if column == "graph" else "right")
    for each in contenders:
        median, best = statistics.median(each.times_ms), min(each.times_ms)
        speeds = f"{statistics.median(base.times_ms) / median:.2f}", f"{min(base.times_ms) / best:.2f}"
        row = f"{median:.1f}", f"{best:.1f}", *speeds, f"{1e3 / median:.0f}", f"{each.load_s:.1f}"
        table.add_row(each.name, *row)
    Console(width=110).print(table, f"speed: x that of {base.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint")
    parser.add_argument("--bundle", action="append", default=[], type=Path)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--genai", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if args.bundle:
            measure_bundles([open_bundle(each) for each in args.bundle], args, folder)
        else:
            measure_checkpoint(args, folder)


def measure_bundles(bundles: list[Bundle], args: argparse.Namespace, folder: Path) -> None:
    """A table for each context, with all bundles that have it."""
    decodes = [(each, graph) for each in bundles for graph in each.manifest.graphs if graph.role == "decode"]
    for context in sorted({graph.context for _, graph in decodes}):
        contenders = [
            contender
            for bundle, graph in decodes
            if graph.context == context
            for contender in in_all_modes(bundle.path.name, bundle, graph, args.threads)
        ]
        peers = genai(spec_of(bundles[0]), context, args.threads, args.genai, folder)
        contenders += peers
        take_turns(contenders, args.steps)
        show(f"a decode step, context {context}, milliseconds", contenders, (peers or contenders)[0])


def measure_checkpoint(args: argparse.Namespace, folder: Path) -> None:
    """A table with two recipes, and the decoder in float."""
    checkpoint = Checkpoint.open(args.checkpoint or str(write_checkpoint(folder / "random", NEWER, SMOLLM2_135M)))
    spec, plain_engine = checkpoint.spec, CpuEngine(args.threads)
    write_float_graph(checkpoint, args.context, folder / "float32.onnx")
    contenders: list[Contender[Any]] = [loaded("float32", lambda: FloatDecoder(folder / "float32.onnx", args.threads))]
    for recipe in RECIPES:
        bundle = export(checkpoint, recipe, args.context, folder)
        modes = in_all_modes(recipe, bundle, bundle.manifest.graphs[0], args.threads)
        as_it_stands = partial(BundleDecoder, bundle, lambda path: MemoryBinding(plain_engine.session(path)))
        plain = loaded(f"{recipe}, node by node", as_it_stands)
        assert_same_bits(modes[0].decoder, plain.decoder)
        contenders += [*modes, plain]
    contenders += genai(spec, args.context, args.threads, args.genai, folder)
    take_turns(contenders, args.steps)
    shape = f"{spec.layers} layers, {spec.heads} heads, hidden {spec.hidden}, context {args.context}"
    show(f"a decode step, {shape}, milliseconds", contenders, contenders[0])


if __name__ == "__main__":
    main()
