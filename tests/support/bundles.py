"""Bundles and what they generate, for tests: changed manifests, single steps, drafters, beams and ties."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from msgspec import structs

import edgekv
from edgekv import SamplingParams
from edgekv.bundle import (
    MANIFEST,
    Bundle,
    GraphRecord,
    MatrixPlace,
    PartRecord,
    RecipeRecord,
    TensorPlace,
    WeightPlaces,
    WeightRecord,
    open_bundle,
)
from edgekv.bundle.formats import SEAL, seal_of
from edgekv.draft import Speculation
from edgekv.engine import Generation
from edgekv.engine.beam_search import BeamSearch, Hypothesis
from edgekv.graphs.source import PartSource
from edgekv.runtime.binding import Binding
from edgekv.spec import EMBEDDING_STEPS, DecoderSpec, table_key, views
from edgekv.spec.tensors import matrices
from edgekv.text import BeamParams
from quant import Encoding


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest in a bundle's folder, as plain JSON, and seal it again."""
    file = folder / MANIFEST
    content = json.loads(file.read_text("utf-8"))
    del content[SEAL]
    change(content)
    file.unlink()  # it may be a link
    file.write_text(json.dumps(content | {SEAL: seal_of(content)}, indent=1), "utf-8")


def replace_in_manifest(folder: Path, old: str, new: str) -> None:
    """Replace text in the manifest, as JSON with a field on each line, and seal it again."""
    file = folder / MANIFEST
    text = json.dumps(json.loads(file.read_text("utf-8")), indent=1)
    assert old in text
    file.unlink()
    file.write_text(text.replace(old, new), "utf-8")
    change_manifest(folder, lambda content: None)


def int8_recipe(spec: DecoderSpec) -> RecipeRecord:
    """Every matrix of a decoder in 8 bits."""
    weights = [WeightRecord(tensor=name, dtype="int8", method="nearest") for name in matrices(spec)]
    return RecipeRecord(name="w8a16", rotation="none", weights=weights)


def places_in_one_file(spec: DecoderSpec, file: str) -> WeightPlaces:
    """Places for the weights of a decoder without biases, matrices in 8 bits, one after the other from byte 8 on."""
    found, end = WeightPlaces(), 8
    for view in views(spec):
        if view.is_matrix:
            columns, rows = view.shape
            scales, is_table = end + rows * columns, view.name == table_key(spec)
            place = MatrixPlace(
                file=file,
                dtype="int8",
                rows=rows,
                columns=columns,
                heads=1,
                integers=end,
                scales=scales,
                by_outputs=is_table,
            )
            found.matrices[view.name], end = place, scales + 4 * columns
        else:
            tensor = TensorPlace(file=file, shape=view.shape, offset=end, encoding=Encoding("u16", 0.5, 32768))
            found.tensors[view.name], end = tensor, end + tensor.extent.bytes
    steps = TensorPlace(file=file, shape=(spec.vocab, 1), offset=end, encoding=Encoding("u16", 0.5, 0))
    found.tensors[EMBEDDING_STEPS] = steps
    return found


Arrays = dict[str, np.ndarray[Any, Any]]


def source_of(folder: Path, file: str = "ar1_cl64.onnx.gz") -> PartSource:
    return PartSource.of(folder, open_bundle(folder).manifest, file)


def any_step(bundle: Bundle, graph: GraphRecord, part: PartRecord | None = None) -> Arrays:
    """Inputs of every integer that their types have, of a graph or a part of it."""
    random, feeds = np.random.default_rng(0), {}
    for port in bundle.manifest.interface.graph(graph, part).inputs:
        low, high = np.iinfo(port.dtype).min, np.iinfo(port.dtype).max
        if port.dtype == "int32":  # ids and rows
            low, high = 0, graph.ar - 1
        values = random.choice([low, high], port.shape) if "mask" in port.name else None
        values = random.integers(low, high, port.shape, endpoint=True) if values is None else values
        feeds[port.name] = values.astype(port.dtype)
    return feeds


def as_built(bundle: Bundle, arrays: Arrays) -> Arrays:
    """Inputs or outputs of an exported graph as those of the built one: its keys are rows."""
    keys = ("past_key", "new_key") if bundle.manifest.key_layout == "columns" else ()
    return {name: each.swapaxes(2, 3).copy() if name.startswith(keys) else each for name, each in arrays.items()}


def as_loaded(binding: Binding, feeds: Arrays) -> Arrays:
    """The inputs with keys and values as a graph reads them: those built for speed read uint8 less 128."""
    interface = binding.interface
    return {
        name: (each.astype(np.int16) - 128).astype(np.int8)
        if each.dtype == np.uint8 and interface[name].dtype == "int8"
        else each
        for name, each in feeds.items()
    }


def outputs(binding: Binding, feeds: Arrays) -> Arrays:
    feeds = as_loaded(binding, feeds)
    made = {port.name: np.zeros(port.shape, port.dtype) for port in binding.interface.outputs}
    for bind, arrays in ((binding.inputs, feeds), (binding.outputs, made)):
        for name, array in arrays.items():
            bind([name], array.dtype, array.shape, [array.ctypes.data])
    binding.run()
    return made


def endless(bundle: Path, *, eos: Sequence[int] = ()) -> Bundle:
    """The bundle without tokens that end a text, or with others, for runtimes that need one."""
    opened = open_bundle(bundle, verify=False)
    tokens = structs.replace(opened.manifest.tokens, eos=list(eos))
    return Bundle(opened.path, structs.replace(opened.manifest, tokens=tokens))


def ending_elsewhere(bundle: Path, prompt: Sequence[int], count: int, engine: str = "htp") -> tuple[Bundle, list[int]]:
    """The bundle with an end token that its text of `count` tokens does not have, and that text, chosen greedily."""
    tokens = [token.id for token in edgekv.load(endless(bundle), engine).generate(list(prompt), count)]
    unchosen = min(set(range(len(tokens) + 1)) - set(tokens))
    return endless(bundle, eos=[unchosen]), tokens


class Oracle:
    """Proposes the true continuation of a text, of random length and with random errors."""

    name = "oracle"

    def __init__(self, text: Sequence[int], vocab: int, seed: int = 0, right: float = 0.85) -> None:
        """Args: text: prompt and output. vocab: of the errors. seed: of the errors. right: how likely a draft is so."""
        self.told: list[int] = []  # drafts accepted of each proposal
        self._text = list(text)
        self._vocab = vocab
        self._right = right
        self._random = random.Random(seed)

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        at, chance = len(tokens), self._random
        length = k if self._right == 1 else chance.randint(0, k)
        true = self._text[at : at + length]
        return [token if chance.random() < self._right else chance.randrange(self._vocab) for token in true]

    def accepted(self, n: int) -> None:
        self.told.append(n)


def with_drafts(
    model: edgekv.Model,
    prompt: Sequence[int],
    params: SamplingParams,
    speculation: Speculation | None,
    *,
    sequence: int | None = None,
    **options: Any,
) -> Generation:
    """As `model.generate`, with any speculation.

    Args:
        model: the model.
        prompt: token ids.
        params: how to sample.
        speculation: what drafts; None for plain decoding.
        sequence: its id; None for the model's own.
        options: `processors`, `return_logits`, `cache_salt`.
    """
    return model.generate(prompt, params, sequence=sequence, speculate=speculation, **options)


class Scorer(Protocol):
    """Computes logits and keeps one state per beam."""

    def first(self) -> np.ndarray[Any, Any]:
        """Logits `[1, V]` after the prompt."""

    def next(self, parents: Sequence[int], tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Logits `[beams, V]` after beam i has continued beam `parents[i]` with `tokens[i]`; 0 after the prompt."""


def run_search(scorer: Scorer, search: BeamSearch) -> tuple[Hypothesis, ...]:
    """Run the search; return the best `num_return_sequences`, best first."""
    search.advance(scorer.first())
    while not search.done:
        search.advance(scorer.next(search.parents, search.tokens))
    return search.best


SUM_STEPS = 17  # two logits, each 8.5 steps of its integers away from where another order of a sum puts it
ROW_STEPS = 256  # of 65,536: cache rows that were computed in another chunk are some steps apart themselves


def assert_same_or_tied(
    found: Sequence[int],
    expected: Sequence[int],
    before: Sequence[int],
    model: edgekv.Model,
    max_steps: int = SUM_STEPS,
) -> None:
    """Equal, or else the two candidates at the first difference are as good as tied.

    Args:
        found: what one run chose behind `before`.
        expected: what the other one chose.
        before: the tokens that both began with.
        model: for the logits.
        max_steps: steps of the logits' integers that a tie may be apart.
    """
    assert len(found) == len(expected)
    differing = [at for at, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    if not differing:
        return
    at = differing[0]
    logits = model.score([*before, *expected[:at]])[-1]
    gap = abs(logits[found[at]] - logits[expected[at]]) / model.bundle.manifest.encodings["logits"].scale
    assert gap <= max_steps, f"token {at}: {found[at]} or {expected[at]}, {gap:.1f} steps apart"


class Separate:
    """A scorer that runs all tokens of every beam again in each step, in the cache of one sequence."""

    def __init__(self, model: edgekv.Model, prompt: Sequence[int]) -> None:
        self._model = model
        self._encoding = model.bundle.manifest.encodings["logits"]
        self._prompt = prompt
        self._beams: list[tuple[int, ...]] = [()]

    def first(self) -> np.ndarray[Any, Any]:
        self._model.cache.reset()
        return self._encoding.dequantize(self._model.session.feed(self._prompt))[None]

    def next(self, parents: Sequence[int], tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        self._beams = [(*self._beams[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        return np.stack([self._logits(beam) for beam in self._beams])

    def _logits(self, beam: Sequence[int]) -> np.ndarray[Any, Any]:
        self._model.cache.rewind(self._model.cache.length - len(self._prompt))
        for token in beam:
            logits = self._model.session.feed((token,))
        return self._encoding.dequantize(logits)


def separate(model: edgekv.Model, prompt: Sequence[int], beams: int, length: int) -> tuple[Hypothesis, ...]:
    """What a search finds whose beams are each run in a cache of their own."""
    manifest = model.bundle.manifest
    options = BeamParams(beams, beams)
    search = BeamSearch(options, eos=manifest.tokens.eos, max_new_tokens=length, vocab=manifest.model.vocab)
    return run_search(Separate(model, prompt), search)
