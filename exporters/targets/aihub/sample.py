"""Inputs with which graphs run on hosted devices, and the comparison of what comes back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from edgekv.bundle import Bundle, GraphRecord, Manifest, open_bundle
from edgekv.engine.sink import read_sink
from edgekv.errors import BundleError, ServiceError, UsageError
from edgekv.kv import KvTensor, LayerSpec, Window
from edgekv.runtime import CpuEngine
from edgekv.runtime.graph import HostTables, StepInputs, rope_tables
from edgekv.spec import LOGITS
from edgekv.spec.text import begins_with
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.piece import Piece
from quant import DTYPES, Encoding

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
        graph = next(record for record in bundle.manifest.graphs if record.name == self.graph)
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
            for tensor in bundle.manifest.cache_geometry.names():
                is_turned = _rows_axis(bundle.manifest.key_layout, tensor.kind) == 3
                rows = sink.rows[tensor.past]
                self._past[tensor.past] = (rows.T if is_turned else rows)[None, None]
        self._ropes = rope_tables(bundle.manifest)
        self._groups = bundle.manifest.cache_geometry.groups()

    def run(self, graph: GraphRecord, tokens: Sequence[int]) -> tuple[Tensors, Tensors]:
        """Run as many tokens as the graph takes; its inputs and outputs."""
        manifest = self._bundle.manifest
        interface = manifest.interface.graph(graph)
        step = StepInputs(manifest, graph, HostTables(self._ropes))
        step.write(tokens, self._done, [self._window(group, graph) for group in self._groups])
        tensors = list(manifest.cache_geometry.names())
        past = {tensor.past: self._padded(tensor, interface[tensor.past].shape, manifest) for tensor in tensors}
        inputs: Tensors = step.arrays | past
        session = CpuEngine().session(self._bundle.graph_path(graph))
        names = [port.name for port in interface.outputs]
        outputs: Tensors = dict(zip(names, session.run(names, inputs), strict=True))
        for tensor in tensors:
            rows = [*([self._past[tensor.past]] if tensor.past in self._past else []), outputs[tensor.new]]
            self._past[tensor.past] = np.concatenate(rows, _rows_axis(manifest.key_layout, tensor.kind))
        self._done += graph.ar
        return inputs, outputs

    def _window(self, group: LayerSpec, graph: GraphRecord) -> Window:
        """The newest rows are at the right end; the last new token of a narrow layer sees fewer than the first."""
        columns = group.past_rows(graph.ar, graph.context)
        held = min(self._done, columns)
        first = columns - held
        leaving = range(first, first + max(0, held - (group.read_rows - graph.ar)))
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


class OutputError(msgspec.Struct, frozen=True, kw_only=True):
    """One output of one step.

    Attributes:
        name: as in the graph.
        sqnr_db: power of the CPU engine's values over that of the difference, 10 log10(sum x^2 / sum (x - y)^2);
            none if the values are equal.
        differing: share of the values that are not equal.
        max_steps: greatest difference, in steps of the output's encoding.
    """

    name: str
    sqnr_db: float | None
    differing: float
    max_steps: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All outputs of one step on one device.

    Attributes:
        graph: name of the graph.
        job: id of the job.
        outputs: in the order of the graph.
        top1_equal: both have the same most likely token.
    """

    graph: str
    job: str
    outputs: list[OutputError]
    top1_equal: bool

    @property
    def worst(self) -> OutputError:
        """The output with the lowest SQNR."""
        return min(self.outputs, key=lambda output: math.inf if output.sqnr_db is None else output.sqnr_db)


def compare(
    manifest: Manifest, graph: str, job: str, expected: Tensors, outputs: Mapping[str, list[NDArray[Any]]]
) -> Comparison:
    """Compare in real numbers, whether the device gave integers or dequantized them.

    Args:
        manifest: has the encodings.
        graph: name of the graph.
        job: id of the job.
        expected: the CPU engine's integers.
        outputs: as the client gives them, a list with one array for each output, in the graph's order. Outputs that
            the service has numbered (`output_0`) are taken in that order.

    Raises:
        ServiceError: an output is missing or has another shape.
    """
    named = dict(outputs)
    if len(named) == len(expected) and all(name.startswith("output_") for name in named):
        named = dict(zip(expected, outputs.values(), strict=True))
    encodings = {tensor.new: manifest.encodings[tensor.past] for tensor in manifest.cache_geometry.names()}
    encodings[LOGITS] = manifest.encodings[LOGITS]
    errors = []
    for name, stored in expected.items():
        value = named[name][0] if named.get(name) else None
        if value is None or value.size != stored.size:
            raise ServiceError(
                f"AI Hub: {name} of job {job}",
                got="no such output" if value is None else f"shape {list(value.shape)}",
                expected=f"shape {list(stored.shape)}",
                fix="Compile again with --force; if that does not help, report the job to AI Hub.",
            )
        errors.append(_error(name, encodings[name], stored, value.reshape(stored.shape)))
    top1 = np.argmax(expected[LOGITS]) == np.argmax(named[LOGITS][0])
    return Comparison(graph=graph, job=job, outputs=errors, top1_equal=bool(top1))


def _error(name: str, encoding: Encoding, expected: NDArray[Any], value: NDArray[Any]) -> OutputError:
    reals = encoding.dequantize(expected).astype(np.float64)
    others = value if np.issubdtype(value.dtype, np.floating) else encoding.dequantize(value)
    difference = reals - others
    noise, signal = float(np.square(difference).sum()), float(np.square(reals).sum())
    return OutputError(
        name=name,
        sqnr_db=None if noise == 0 else 10 * math.log10(max(signal, 1e-300) / noise),
        differing=float(np.count_nonzero(difference) / difference.size),
        max_steps=float(np.abs(difference).max() / encoding.scale),
    )
