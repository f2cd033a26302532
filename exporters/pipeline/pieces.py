"""The pieces of an export: survey, text, layer, head, check and compile; see `write` for what ends it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from devices import Device, find, find_proxy
from edgekv.bundle import (
    CompiledBinary,
    Manifest,
    WeightPlaces,
    WeightRecord,
    open_bundle,
)
from edgekv.errors import UsageError
from edgekv.machine.decoding import analysed
from edgekv.qnn.options import HtpOptions
from edgekv.spec import DecoderSpec
from edgekv.spec.text import begins_with
from exporters.graphs.onnx import ask_for_head, ask_for_layer, write_head, write_layer
from exporters.graphs.weights import AskedWeights
from exporters.htp.binary import check_chip
from exporters.htp.check import floating_nodes
from exporters.htp.compile import COMPILER_DEFAULTS, compile_graphs
from exporters.htp.compile_tflite import compile_tflite
from exporters.htp.costs import Costs
from exporters.htp.estimate import Simulation, simulate
from exporters.htp.schedule import Schedule
from exporters.lora.ranges import adapted_ranges
from exporters.pipeline.inputs import BUNDLE, LAYER, TOKENS, DecoderKey, Inputs, ProvenAdapter
from exporters.pipeline.layer_file import LayerFile
from exporters.pipeline.piece import Piece
from exporters.pipeline.store import PieceStore
from exporters.pipeline.survey_file import write_survey
from exporters.quantize.generated import Beginnings, generated_windows, text_tokens
from exporters.quantize.recipe import Recipe, WeightRule
from exporters.quantize.reference import NO_CHANGES
from exporters.quantize.survey import survey
from quant import QuantizedWeight

SCHEDULES = "schedules.msgpack"
_ADAPTED_WINDOWS = 3  # one of so many runs with an adapter: headroom covers the others


@dataclass(frozen=True, slots=True)
class SurveyPiece(Piece):
    """Calibration statistics of the exact decoder, whose values are checked first.

    Attributes:
        exact: the decoder.
        tokens: name of the token ids of the windows; None if nothing depends on a survey.
        first: number of first tokens that may become a sink.
        adapter: that runs beside the weights, whose values are not checked again then; None for none.
    """

    kind: ClassVar[str] = "survey"

    exact: DecoderKey
    tokens: str | None
    first: int
    adapter: ProvenAdapter | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        return (*self.exact.needs, *(() if self.tokens is None else (self.tokens,)))

    def make(self, folder: Path, inputs: Inputs) -> object:
        changes = NO_CHANGES
        if self.adapter is None:
            inputs.check_values(self.exact)
        else:
            changes = inputs.changes(self.adapter, self.exact)
        if self.tokens is not None:
            windows, told = inputs.tokens(self.tokens), partial(inputs.progress, "survey")
            result = survey(inputs.exact(self.exact), windows, self.exact.context, self.first, told, changes)
            write_survey(result, folder)
        return None


@dataclass(frozen=True, slots=True)
class TextPiece(Piece):
    """Windows of text that the exact decoder writes, for learning how to round; for a drafter its target writes them.

    Attributes:
        decoder: the exact one; its sink decides how windows begin.
        tokenizer: see `Identity`; of a drafter's target, its own.
        bos: how they begin without a sink, or behind no survey.
        opening: what stands before a user's first message, with which some of them go on; empty without a template.
        special: ids of chats that stand for no text.
        number: of the batch.
        windows: their number.
        length: tokens of a window.
    """

    kind: ClassVar[str] = "text"

    decoder: DecoderKey
    tokenizer: str
    bos: tuple[int, ...]
    opening: tuple[int, ...]
    special: tuple[int, ...]
    number: int
    windows: int
    length: int

    @property
    def needs(self) -> tuple[str, ...]:
        return self.decoder.needs

    def make(self, folder: Path, inputs: Inputs) -> object:
        checkpoint = inputs.text_checkpoint(self.decoder, self.tokenizer)
        first = self.bos if self.decoder.survey is None else inputs.beginning(self.decoder, self.bos)[0]
        chat = self.opening[len(first) :] if begins_with(self.opening, first) else self.opening
        tokens = generated_windows(
            checkpoint,
            Beginnings(first, text_tokens(checkpoint.tokenizer, checkpoint.spec.vocab), self.special, chat),
            self.number,
            self.windows,
            self.length,
            partial(inputs.progress, f"write text {self.number + 1}"),
        )
        np.save(folder / TOKENS, tokens)
        return None


@dataclass(frozen=True, slots=True)
class LayerPiece(Piece):
    """The quantized matrices of a layer, the ranges of its results, and the residual after it.

    Attributes:
        decoder: what is quantized, and its calibration text.
        layer: its number.
        rules: of its matrices.
        follows: whether the quantized decoder runs beside the exact one.
        before: name of the layer before; None for the first.
        shared: names of the pieces with keys and values of other layers that it reads.
    """

    kind: ClassVar[str] = "layer"

    decoder: DecoderKey
    layer: int
    rules: tuple[WeightRecord, ...]
    follows: bool
    before: str | None
    shared: tuple[str, ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        return (*self.decoder.needs, *(() if self.before is None else (self.before,)), *self.shared)

    def unusable(self, store: PieceStore) -> str | None:
        return _without_residual(store, self.before)

    def make(self, folder: Path, inputs: Inputs) -> object:
        quantizer = inputs.take_quantizer(self.decoder, recipe_of(self.rules), self.before, follows=self.follows)
        for name in self.shared:
            quantizer.share(inputs.layer(name).shared())
        matrices = dict[str, QuantizedWeight]()
        if self.before is None and self.decoder.target:
            text = inputs.target_text(self.decoder)
            matrices |= quantizer.enter(text.hidden, text.rows)
        matrices |= quantizer.layer(self.layer)
        ranges = quantizer.take_ranges()
        shared = quantizer.shared_rows(self.layer)
        place = folder / LAYER
        place.mkdir()
        places = write_layer(inputs.folded(self.decoder), matrices, self.layer, place)
        unreached = [matrix for matrix in quantizer.unreached if matrix.startswith(f"{self.layer}.")]
        hidden = quantizer.hidden if inputs.stores_residual(self.layer, self.decoder.spec.layers) else None
        LayerFile.write(place, places, ranges, hidden, shared, unreached)
        inputs.keep(self.name, folder, quantizer)
        return None


@dataclass(frozen=True, slots=True)
class HeadPiece(Piece):
    """The quantized matrices behind the layers; see `LayerPiece`."""

    kind: ClassVar[str] = "head"

    decoder: DecoderKey
    rules: tuple[WeightRecord, ...]
    follows: bool
    before: str

    @property
    def needs(self) -> tuple[str, ...]:
        return (*self.decoder.needs, self.before)

    def unusable(self, store: PieceStore) -> str | None:
        return _without_residual(store, self.before)

    def make(self, folder: Path, inputs: Inputs) -> object:
        quantizer = inputs.take_quantizer(self.decoder, recipe_of(self.rules), self.before, follows=self.follows)
        matrices, place = dict(quantizer.head()), folder / LAYER
        place.mkdir()
        places = write_head(inputs.folded(self.decoder), matrices, place)
        LayerFile.write(place, places, quantizer.take_ranges(), None)
        inputs.keep(self.name, folder, None)
        return None


@dataclass(frozen=True, slots=True)
class RangesPiece(Piece):
    """The ranges of all results of the exact decoder with an adapter.

    Attributes:
        decoder: what is quantized, and its calibration text.
        adapter: what runs beside its matrices.
    """

    kind: ClassVar[str] = "ranges"

    decoder: DecoderKey
    adapter: ProvenAdapter

    @property
    def needs(self) -> tuple[str, ...]:
        return self.decoder.needs

    def make(self, folder: Path, inputs: Inputs) -> object:
        tensors, surveyed = inputs.folded(self.decoder), inputs.surveyed(self.decoder)
        changes, told = inputs.changes(self.adapter, self.decoder, tensors), partial(inputs.progress, "adapter")
        sink, context = surveyed.sink_tokens, self.decoder.context
        tokens = surveyed.tokens[::_ADAPTED_WINDOWS]
        ranges = adapted_ranges(tensors, changes, tokens, context, sink, told)
        (folder / LAYER).mkdir()
        LayerFile.write(folder / LAYER, WeightPlaces(), ranges, None)
        return None


@dataclass(frozen=True, slots=True)
class CheckPiece(Piece):
    """The float check of a graph for a chip; answers its float nodes.

    Attributes:
        bundle: name of the bundle.
        file: of the graph.
        soc: the chip.
        compiler: its version.
    """

    kind: ClassVar[str] = "check"
    in_child: ClassVar[bool] = True

    bundle: str
    file: str
    soc: str
    compiler: str

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.bundle,)

    def make(self, folder: Path, inputs: Inputs) -> list[str]:
        return floating_nodes([inputs.bundle(self.bundle) / self.file], find(self.soc))


class CompileResult(CompiledBinary, frozen=True, kw_only=True):
    """A binary, the float nodes of each file in it, and the peak RAM of its compiler, if that is known."""

    floating: dict[str, list[str]]
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class CompilePiece(Piece):
    """A context binary for a chip, checked for float nodes in the same run; answers `CompileResult`.

    Attributes:
        bundle: name of the bundle.
        files: of the graphs in the binary, by the names of the graphs.
        soc: the chip.
        compiler: its version.
        htp: options of the compiler.
        prefix: of the names of a binary of several graphs, and of its wrappers.
    """

    kind: ClassVar[str] = "compile"
    in_child: ClassVar[bool] = True

    bundle: str
    files: tuple[tuple[str, str], ...]
    soc: str
    compiler: str
    htp: HtpOptions = COMPILER_DEFAULTS
    prefix: str = "shared_"

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.bundle,)

    def make(self, folder: Path, inputs: Inputs) -> CompileResult:
        place = inputs.bundle(self.bundle)
        floating: dict[str, list[str]] = {}
        peaks: dict[str, int] = {}
        device: Device = find(self.soc)
        binary = compile_graphs(
            device,
            {name: place / file for name, file in self.files},
            folder,
            prefix=self.prefix if len(self.files) > 1 else "",
            watch=peaks.__setitem__,
            lint=floating.__setitem__,
            options=self.htp,
        )
        return CompileResult(
            file=binary.file,
            wrappers=binary.wrappers,
            graphs=binary.graphs,
            optimization=binary.optimization,
            floating=floating,
            peak_bytes=peaks[binary.file],
        )


@dataclass(frozen=True, slots=True)
class EstimatePiece(Piece):
    """What the HTP compiler simulates of the graphs of a binary; answers their `Costs`, and keeps their schedules.

    Attributes:
        graphs: name of the folder with the graphs, after their content.
        files: of the graphs in the binary, in order.
        proxy: part number of the chip that is simulated.
        compiler: its version.
        htp: options of the compiler.
    """

    kind: ClassVar[str] = "estimate"
    in_child: ClassVar[bool] = True

    graphs: str
    files: tuple[str, ...]
    proxy: str
    compiler: str
    htp: HtpOptions = COMPILER_DEFAULTS

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.graphs,)

    def make(self, folder: Path, inputs: Inputs) -> list[Costs]:
        place = inputs.bundle(self.graphs)
        simulations = simulate([place / file for file in self.files], find_proxy(self.proxy), self.htp)
        (folder / SCHEDULES).write_bytes(msgspec.msgpack.encode([simulation.schedule for simulation in simulations]))
        return [simulation.costs for simulation in simulations]


@dataclass(frozen=True, slots=True)
class CompileTflitePiece(Piece):
    """A `.tflite` file whose graphs call one context for a chip; answers `CompileResult`.

    Attributes:
        bundle: name of the bundle.
        file: of the graphs.
        graphs: the signatures to compile.
        soc: the chip.
        compiler: its version.
    """

    kind: ClassVar[str] = "compile"
    in_child: ClassVar[bool] = True

    bundle: str
    file: str
    graphs: tuple[str, ...]
    soc: str
    compiler: str

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.bundle,)

    def make(self, folder: Path, inputs: Inputs) -> CompileResult:
        device, target = find(self.soc), folder / self.file
        compile_tflite(inputs.bundle(self.bundle) / self.file, target, self.graphs, device)
        check_chip(target, device)
        return CompileResult(
            file=self.file,
            wrappers=dict.fromkeys(self.graphs, self.file),
            graphs=len(self.graphs),
            optimization=None,
            floating={},
            peak_bytes=None,
        )


def _without_residual(store: PieceStore, layer: str | None) -> str | None:
    """The name of a finished layer if it left out the residual after it."""
    left_out = layer is not None and LayerFile.leaves_out_residual(store.folder / layer / LAYER)
    return layer if left_out else None


def recipe_of(rules: Iterable[WeightRecord]) -> Recipe:
    """A recipe of these rules alone, for pieces that read no others."""
    weights = tuple(WeightRule(tensors=rule.tensor, dtype=rule.dtype, method=rule.method) for rule in rules)
    return Recipe(weights=weights)


def asked_places(spec: DecoderSpec, recipe: Recipe) -> Iterator[WeightPlaces]:
    """What graphs ask for of each layer, and of what is behind the layers."""
    for layer in spec.own_layers:
        asked = AskedWeights(spec, recipe)
        ask_for_layer(spec, layer, asked)
        yield asked.places
    asked = AskedWeights(spec, recipe)
    ask_for_head(spec, asked)
    yield asked.places


def read_manifest(store: PieceStore, name: str) -> Manifest:
    """The manifest of a written bundle."""
    with store.reading(name) as folder:
        return open_bundle(folder / BUNDLE, verify=False).manifest


def read_estimate(store: PieceStore, name: str) -> list[Simulation]:
    """What a finished `EstimatePiece` has found, a graph each."""
    costs = store.answer(name, list[Costs])
    schedules = msgspec.msgpack.decode(store.files(name)[SCHEDULES].read_bytes(), type=analysed(list[Schedule]))
    return [Simulation(*both) for both in zip(costs, schedules, strict=True)]


def read_compiled(store: PieceStore, name: str) -> CompileResult:
    """The answer of a finished `CompilePiece`.

    Raises:
        UsageError: it names other files than those of its piece.
    """
    compiled, files = store.answer(name, CompileResult), store.files(name)
    named = {compiled.file, *compiled.wrappers.values()}
    if named != {*files}:
        raise UsageError(
            f"piece {name}",
            got=f"a binary of {', '.join(sorted(named))}",
            expected=f"its files {', '.join(files)}",
            fix=f"Remove the piece from {store.place}, and run the same command again.",
        )
    return compiled
