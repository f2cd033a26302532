"""A decode step of the CPU engine beside the same decoder in float32, and beside onnxruntime-genai.

    python -m benchmarks.cpu_decode [--checkpoint DIR] [--context 1024] [--steps 80] [--threads N] [--genai DIR]

Without `--checkpoint`, random weights of SmolLM2-135M's shape. All graphs alternate in one process, so that changes of
the machine's speed affect all; the first step of a turn is not counted. `node by node` is the bundle's graph as
exported, which must give the same bits as the CPU engine; `float32` is a plain ONNX graph of the same decoder with the
same inputs and outputs, keys and values in float. `--genai` names a folder that onnxruntime-genai's model builder made
of the same checkpoint (`-p int4 -e cpu`); that loop reads only the tokens it holds, half a context, where the static
graphs always read all of it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

from benchmarks.float_graph import write_float_graph
from benchmarks.quantization import rounded_to_nearest
from devices import find
from edgekv.bundle import Bundle, open_bundle
from edgekv.kv import KVCache
from edgekv.runtime import CpuEngine, StaticGraph
from edgekv.runtime.binding import Binding, MemoryBinding
from edgekv.runtime.rope import rope_tables
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
    """The decode graph of a bundle on a cache of its own."""

    def __init__(self, bundle: Bundle, load: Callable[[Path], Binding]) -> None:
        manifest, record = bundle.manifest, bundle.manifest.graphs[0]
        cache = KVCache(manifest.geometry, ar=(1,), strategy="slot", policy="sliding-window")
        self.graph = StaticGraph([load(bundle.graph_path(record))], manifest, record, cache, rope_tables(manifest))

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
    """onnxruntime-genai behind half a context of random tokens."""

    def __init__(self, folder: Path, context: int, vocab: int) -> None:
        import onnxruntime_genai as og  # an extra

        parameters = og.GeneratorParams(model := og.Model(str(folder)))
        parameters.set_search_options(max_length=context, min_length=context)
        self._generator = og.Generator(model, parameters)
        self._generator.append_tokens(np.random.default_rng(0).integers(vocab, size=context // 2).astype(np.int32))

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
        assert same, f"{fast.graph.record.name}: merging heads has changed a bit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--genai", type=Path)
    args = parser.parse_args()
    engine = CpuEngine(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        checkpoint = Checkpoint.open(args.checkpoint or str(write_checkpoint(folder / "random", NEWER, SMOLLM2_135M)))
        write_float_graph(checkpoint, args.context, folder / "float32.onnx")
        contenders: list[Contender[Any]] = [
            loaded("float32", lambda: FloatDecoder(folder / "float32.onnx", args.threads))
        ]
        for recipe in RECIPES:
            bundle = export(checkpoint, recipe, args.context, folder)
            fast = loaded(recipe, partial(BundleDecoder, bundle, lambda path: engine.load(path, path.stem)))
            as_it_stands = partial(BundleDecoder, bundle, lambda path: MemoryBinding(engine.session(path)))
            plain = loaded(f"{recipe}, node by node", as_it_stands)
            assert_same_bits(fast.decoder, plain.decoder)
            contenders += [fast, plain]
        if args.genai is not None:
            genai = partial(GenaiDecoder, args.genai, args.context, checkpoint.spec.vocab)
            contenders.append(loaded("onnxruntime-genai, int4", genai))
        take_turns(contenders, args.steps)

    spec = checkpoint.spec
    shape = f"{spec.layers} layers, {spec.heads} heads, hidden {spec.hidden}, context {args.context}"
    table = Table(title=f"a decode step, {shape}, milliseconds")
    for column in ("graph", "median", "best", "median / float32", "best / float32", "tokens/s", "load s"):
        table.add_column(column, justify="left" if column == "graph" else "right")
    base = contenders[0].times_ms
    for each in contenders:
        median, best = statistics.median(each.times_ms), min(each.times_ms)
        ratios = f"{median / statistics.median(base):.2f}", f"{best / min(base):.2f}"
        row = f"{median:.1f}", f"{best:.1f}", *ratios, f"{1e3 / median:.0f}", f"{each.load_s:.1f}"
        table.add_row(each.name, *row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
