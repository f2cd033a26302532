"""Prefill on the CPU: a prompt through a bundle in every mode, beside onnxruntime-genai.

    pip install onnxruntime-genai
    python -m benchmarks.cpu_prefill --bundle DIR [--tokens 480] [--turns 5] [--threads N] [--genai DIR]

Every contender runs the same number of random tokens into an empty cache; the bundle in windows of its largest AR.
Turns alternate in one process. See `benchmarks.cpu_decode` for onnxruntime-genai's graph.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

import edgekv
from benchmarks.cpu_decode import spec_of
from benchmarks.genai_graph import write_genai_folder
from edgekv.bundle import Bundle, open_bundle
from edgekv.runtime import CPU_MODES


class Prefill(Protocol):
    def run(self, tokens: list[int]) -> None:
        """Compute these tokens from an empty cache."""


class BundlePrefill:
    """A bundle in one mode."""

    def __init__(self, bundle: Bundle, mode: str, threads: int | None) -> None:
        self._model = edgekv.load(bundle, cpu_mode=mode, threads=threads)

    def run(self, tokens: list[int]) -> None:
        self._model.session.reset()
        for _ in self._model.generate(tokens, max_new_tokens=1, ignore_eos=True):
            pass


class GenaiPrefill:
    """onnxruntime-genai."""

    def __init__(self, folder: Path, context: int, threads: int | None) -> None:
        import onnxruntime_genai as og  # an extra

        config = og.Config(str(folder))
        if threads is not None:
            config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {threads}}}}}}}}}')
        self._og, self._model, self._context = og, og.Model(config), context

    def run(self, tokens: list[int], new: int = 1) -> None:
        parameters = self._og.GeneratorParams(self._model)
        parameters.set_search_options(max_length=self._context, min_length=self._context)
        generator = self._og.Generator(self._model, parameters)
        generator.append_tokens(np.array(tokens, np.int32))
        for _ in range(new):
            generator.generate_next_token()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=480)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--genai", type=Path)
    args = parser.parse_args()
    bundle = open_bundle(args.bundle)
    manifest = bundle.manifest
    contenders: dict[str, Prefill] = {mode: BundlePrefill(bundle, mode, args.threads) for mode in CPU_MODES}
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.genai or write_genai_folder(spec_of(bundle), manifest.context, Path(scratch))
        contenders["onnxruntime-genai, int4"] = GenaiPrefill(folder, manifest.context, args.threads)
        tokens = np.random.default_rng(0).integers(10, manifest.model.vocab, args.tokens).tolist()
        times_s: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(args.turns + 1):
            for name, contender in contenders.items():
                began = time.perf_counter()
                contender.run(tokens)
                if turn:
                    times_s[name].append(time.perf_counter() - began)
    show(f"prefill of {args.tokens} tokens, AR {max(graph.ar for graph in manifest.graphs)}", args.tokens, times_s)


def show(title: str, tokens: int, times_s: dict[str, list[float]]) -> None:
    base: Any = [*times_s.values()][-1]
    table = Table(title=title)
    for column in ("", "tokens/s, median", "tokens/s, best", "speed, median", "speed, best"):
        table.add_column(column, justify="right" if column else "left")
    for name, times in times_s.items():
        median, best = statistics.median(times), min(times)
        ratios = f"{statistics.median(base) / median:.2f}", f"{min(base) / best:.2f}"
        table.add_row(name, f"{tokens / median:.0f}", f"{tokens / best:.0f}", *ratios)
    Console(width=110).print(table, "speed: x that of the last line")


if __name__ == "__main__":
    main()
