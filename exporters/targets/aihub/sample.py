"""One real step of each graph: inputs as in a generation, and the outputs of the CPU engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from edgekv.bundle import Bundle, GraphRecord, Manifest, open_bundle
from edgekv.engine.sink import read_sink
from edgekv.errors import BundleError, UsageError
from edgekv.kv import Geometry, KvTensor, Window
from edgekv.runtime import CpuEngine
from edgekv.runtime.graph import StepInputs, rope_tables
from edgekv.spec.text import begins_with
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.piece import Piece
from quant import DTYPES

SAMPLE = "sample.safetensors"
_INPUT, _OUTPUT = "input.", "output."

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Sample:
    """A step of one graph.

    Attributes:
        inputs: by name, in the types and shapes of the graph.
        outputs: of the CPU engine, by name.
    """

    inputs: Tensors
    outputs: Tensors


@dataclass(frozen=True, slots=True)
class SamplePiece(Piece):
    """The next step of a graph after the beginning of a text, run on the CPU.

    Attributes:
        bundle: name of the bundle, whose graphs run.
        graph: to sample; its step comes after as much of the text as two prefill steps take.
        text: name of the text.
    """

    kind: ClassVar[str] = "sample"

    bundle: str
    graph: str
    text: str

    @property
    def needs(self) -> tuple[str, ...]:
        return self.bundle, self.text

    def make(self, folder: Path, inputs: Inputs) -> object:
        bundle = open_bundle(inputs.bundle(self.bundle), verify=False)
        graph = next(each for each in bundle.manifest.graphs if each.name == self.graph)
        taken = take_sample(bundle, graph, inputs.text(self.text))
        named = {_INPUT + name: value for name, value in taken.inputs.items()}
        named |= {_OUTPUT + name: value for name, value in taken.outputs.items()}
        (folder / SAMPLE).write_bytes(save(named))
        return None


def take_sample(bundle: Bundle, graph: GraphRecord, text: str) -> Sample:
    """Run the beginning of a text on the CPU, and the next step of a graph.

    Args:
        bundle: whose graphs run.
        graph: see `SamplePiece`.
        text: real text, such as the calibration text.

    Raises:
        UsageError: the text has too few tokens.
        EngineError: the CPU engine refused a graph.
    """
    same_context = [g for g in bundle.manifest.graphs if g.role != "score" and g.context == graph.context]
    feeder = max(same_context, key=lambda g: g.ar)
    sink = [] if bundle.manifest.sink is None else bundle.manifest.sink.tokens
    before = min(2, (bundle.manifest.context - len(sink) - graph.ar) // feeder.ar) * feeder.ar
    tokens = bundle.tokenizer().encode(text).ids
    start = len(sink) if begins_with(tokens, sink) else 0
    tokens = tokens[start : start + before + graph.ar]
    if len(tokens) < before + graph.ar:
        raise UsageError(
            "--text", got=f"{len(tokens)} tokens", expected=f"{before + graph.ar}", fix="Give a longer text."
        )
    steps = _Steps(bundle)
    for start in range(0, before, feeder.ar):
        steps.run(feeder, tokens[start : start + feeder.ar])
    return Sample(*steps.run(graph, tokens[before:]))


class _Steps:
    """Steps of a bundle's graphs with the past held as plain arrays, left-padded; it begins with the sink."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._done = 0
        self._past: dict[str, NDArray[Any]] = {}
        if (sink := read_sink(bundle)) is not None:
            self._done = len(sink.tokens)
            for each in bundle.manifest.cache_geometry.names():
                is_turned = _rows_axis(bundle.manifest.key_layout, each.kind) == 3
                rows = sink.rows[each.past]
                self._past[each.past] = (rows.T if is_turned else rows)[None, None]
        self._ropes = rope_tables(bundle.manifest)
        self._groups = bundle.manifest.cache_geometry.groups()

    def run(self, graph: GraphRecord, tokens: Sequence[int]) -> tuple[Tensors, Tensors]:
        """Run as many tokens as the graph takes; its inputs and outputs."""
        manifest = self._bundle.manifest
        interface = manifest.interface.graph(graph)
        step = StepInputs(manifest, graph, self._ropes)
        step.write(tokens, self._done, [self._window(group, graph) for group in self._groups])
        tensors = list(manifest.cache_geometry.names())
        past = {each.past: self._padded(each, interface[each.past].shape, manifest) for each in tensors}
        inputs: Tensors = step.arrays | past
        session = CpuEngine().session(self._bundle.graph_path(graph))
        names = [port.name for port in interface.outputs]
        outputs: Tensors = dict(zip(names, session.run(names, inputs), strict=True))
        for each in tensors:
            rows = [*([self._past[each.past]] if each.past in self._past else []), outputs[each.new]]
            self._past[each.past] = np.concatenate(rows, _rows_axis(manifest.key_layout, each.kind))
        self._done += graph.ar
        return inputs, outputs

    def _window(self, group: Geometry, graph: GraphRecord) -> Window:
        """The newest rows are at the right end; the last new token of a narrow layer sees fewer than the first."""
        columns = group.past_rows(graph.ar, graph.context)
        held = min(self._done, columns)
        first = columns - held
        leaving = range(first, first + max(0, held - (group.context - graph.ar)))
        return Window(graph.ar, columns, 0, 0, False, first, columns, tuple(leaving))

    def _padded(self, tensor: KvTensor, shape: tuple[int, ...], manifest: Manifest) -> NDArray[Any]:
        """The newest rows of a tensor, behind rows that stand for zero."""
        encoding = manifest.encodings[tensor.past]
        padded = np.full(shape, encoding.zero_point, DTYPES[encoding.dtype])
        if tensor.past in self._past:
            axis, held = _rows_axis(manifest.key_layout, tensor.kind), self._past[tensor.past]
            count = min(shape[axis], held.shape[axis])
            target, source = [slice(None)] * 4, [slice(None)] * 4
            target[axis] = slice(shape[axis] - count, None)
            source[axis] = slice(held.shape[axis] - count, None)
            padded[tuple(target)] = held[tuple(source)]
        return padded


def _rows_axis(key_layout: str, kind: str) -> int:
    return 3 if kind == "key" and key_layout == "columns" else 2


def read_sample(path: Path) -> Sample:
    """The step that `SamplePiece` has written.

    Raises:
        BundleError: the file is missing.
    """
    if not path.is_file():
        raise BundleError(
            str(path), got="no such file", expected="the step that was submitted", fix="Run: edgekv hub infer"
        )
    values = load_file(path)
    inputs = {name.removeprefix(_INPUT): value for name, value in values.items() if name.startswith(_INPUT)}
    outputs = {name.removeprefix(_OUTPUT): value for name, value in values.items() if name.startswith(_OUTPUT)}
    return Sample(inputs, outputs)
