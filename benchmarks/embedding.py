"""Embeddings of many short texts on the CPU, beside sentence-transformers on the same checkpoint.

    pip install "edgekv[parity]"
    python -m benchmarks.embedding --checkpoint DIR --bundle DIR [--modes fast,exact16] [--texts 1000] [--turns 3]
        [--threads 1] [--processor-time]

The texts are first lines of the standard library's docstrings. Each contender has a process of its own, and they take
turns; edgekv also runs each text by itself. sentence-transformers sorts texts by length and pads batches of 32, its
default, in float32. `--processor-time` counts the time of the process instead of the clock's, for machines with other
work; then give `--threads 1`.
"""

from __future__ import annotations

import argparse
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import edgekv
from benchmarks.cpu_peers import Contender
from benchmarks.turns import by_turns

Vectors = NDArray[np.float32]
_PACKAGES = ("asyncio", "concurrent", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest")
_MIN_CHARACTERS = 20


class EdgekvEmbedder:
    """A bundle in one mode.

    Attributes:
        shares: whether texts share passes.
    """

    def __init__(self, bundle: Path, mode: str, threads: int | None, shares: bool) -> None:
        self._model = edgekv.load(bundle, cpu_mode=mode, threads=threads)
        self.shares = shares

    def run(self, texts: list[str]) -> Vectors:
        """The embeddings."""
        if self.shares:
            return self._model.embed(texts)
        return np.concatenate([self._model.embed([text]) for text in texts])


class SentenceTransformers:
    """A checkpoint in float32."""

    def __init__(self, checkpoint: Path, threads: int | None) -> None:
        import torch  # an extra, as the next
        from sentence_transformers import SentenceTransformer

        if threads is not None:
            torch.set_num_threads(threads)
        self._model = SentenceTransformer(str(checkpoint), device="cpu", model_kwargs={"dtype": torch.float32})
        tokenizer = self._model.tokenizer
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)

    def run(self, texts: list[str]) -> Vectors:
        """The embeddings."""
        return np.asarray(self._model.encode(texts, show_progress_bar=False))


def library_docstrings() -> Iterator[str]:
    """Docstrings of packages of the standard library, in a fixed order; a subclass repeats those that it inherits."""
    for package in _PACKAGES:
        names = [f"{package}.{each.name}" for each in pkgutil.iter_modules(import_module(package).__path__)]
        for name in [package, *names]:
            if not name.endswith("__main__"):
                yield from _docstrings(name)


def library_texts(count: int) -> list[str]:
    """First lines of docstrings of the standard library, in a fixed order."""
    found = dict[str, None]()
    for document in library_docstrings():
        if len(line := document.partition("\n")[0]) >= _MIN_CHARACTERS:
            found[line] = None
        if len(found) == count:
            return [*found]
    sys.exit(f"got {len(found)} docstrings; expected {count}")


def _docstrings(module_name: str) -> list[str]:
    try:
        module = import_module(module_name)
    except Exception:  # of another system
        return []
    kinds = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module_name]
    members = [each for kind in (module, *kinds) for _, each in inspect.getmembers(kind, inspect.isroutine)]
    documents = [inspect.getdoc(each) for each in (*kinds, *members)]
    return [document.strip() for document in documents if document]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--modes", default="fast")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    texts, threads = library_texts(args.texts), args.threads
    makes: dict[str, Callable[[], object]] = {
        "sentence-transformers, float32": partial(SentenceTransformers, args.checkpoint, threads)
    }
    for mode in args.modes.split(","):
        makes[f"edgekv, {mode}"] = partial(EdgekvEmbedder, args.bundle, mode, threads, True)
        makes[f"edgekv, {mode}, a text a pass"] = partial(EdgekvEmbedder, args.bundle, mode, threads, False)
    processes = {name: Contender(make, args.processor_time) for name, make in makes.items()}
    found = by_turns({name: partial(process.run, texts) for name, process in processes.items()}, args.turns)
    characters = sum(map(len, texts)) / len(texts)
    clock = "processor time" if args.processor_time else "time"
    count = "all threads" if threads is None else f"{threads} thread{'s' * (threads > 1)}"
    table = Table(title=f"{len(texts)} texts of {characters:.0f} characters on average, {count}; median {clock}")
    for column in ("", "texts/s", "seconds", "mean cosine"):
        table.add_column(column, justify="right" if column else "left")
    exact = found["sentence-transformers, float32"][0][1]
    for name, turns in found.items():
        seconds = median(each for each, _ in turns)
        cosine = (turns[0][1] * exact).sum(-1) / np.linalg.norm(turns[0][1], axis=-1) / np.linalg.norm(exact, axis=-1)
        table.add_row(name, f"{len(texts) / seconds:.0f}", f"{seconds:.2f}", f"{cosine.mean():.4f}")
    Console(width=110).print(table)
    for process in processes.values():
        process.end()


if __name__ == "__main__":
    main()
