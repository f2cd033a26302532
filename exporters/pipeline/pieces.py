"""The pieces of an export: survey, text, layer, head, write, check and compile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from devices import Device, find, find_proxy
from edgekv.bundle import (
    AdapterRecord,
    CompiledBinary,
    Manifest,
    SourceRecord,
    WeightRecord,
    open_bundle,
    record_files,
    write_manifest,
)
from edgekv.errors import UsageError
from edgekv.machine.system import link_or_copy
from edgekv.qnn.options import HtpOptions
from edgekv.spec import EMBEDDING, DecoderSpec, views
from edgekv.spec.text import begins_with
from exporters.contents import BundleForm, make_manifest, write_contents
from exporters.htp.binary import check_chip
from exporters.htp.check import floating_nodes
from exporters.htp.compile import COMPILER_DEFAULTS, compile_graphs
from exporters.htp.compile_tflite import compile_tflite
from exporters.htp.costs import Costs
from exporters.htp.estimate import Simulation, simulate
from exporters.htp.schedule import Schedule
from exporters.lora.ranges import adapted_ranges
from exporters.pipeline.encoder import Encoded
from exporters.pipeline.inputs import BUNDLE, LAYER, TOKENS, Exact, Folded, Inputs, ProvenAdapter, SinkChoice
from exporters.pipeline.layer_file import LayerFile, LayerMatrices
from exporters.pipeline.piece import Piece
from exporters.pipeline.place import Identity
from exporters.pipeline.store import PieceStore
from exporters.pipeline.survey_file import write_survey
from exporters.quantize.as_stored import stored_record
from exporters.quantize.generated import Beginnings, generated_windows, text_tokens
from exporters.quantize.recipe import Recipe, WeightRule
from exporters.quantize.reference import NO_CHANGES
from exporters.quantize.survey import survey
from quant import Range

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

    exact: Exact
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
            found = survey(inputs.exact(self.exact), windows, self.exact.context, self.first, told, changes)
            write_survey(found, folder)
        return None


@dataclass(frozen=True, slots=True)
class TextPiece(Piece):
    """Windows of text that the exact decoder writes, for learning how to round.

    Attributes:
        exact: the decoder.
        tokenizer: see `Identity`.
        sink: decides how windows begin.
        bos: how they begin without a sink.
        opening: what stands before a user's first message, with which some of them go on; empty without a template.
        special: ids of chats that stand for no text.
        number: of the batch.
        windows: their number.
        length: tokens of a window.
    """

    kind: ClassVar[str] = "text"

    exact: Exact
    tokenizer: str
    sink: SinkChoice
    bos: tuple[int, ...]
    opening: tuple[int, ...]
    special: tuple[int, ...]
    number: int
    windows: int
    length: int

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.sink.survey,)

    def make(self, folder: Path, inputs: Inputs) -> object:
        has_sink = self.sink.chooses(inputs.survey(self.sink.survey, self.exact))
        checkpoint = inputs.text_checkpoint(self.exact, self.tokenizer)
        first = self.sink.first if has_sink else self.bos
        chat = self.opening[len(first) :] if begins_with(self.opening, first) else self.opening
        tokens = generated_windows(
            checkpoint,
            Beginnings(first, text_tokens(checkpoint.tokenizer, checkpoint.spec.vocab), self.special, chat),
            self.number,
            self.windows,
            self.length,
            lambda written: inputs.progress(f"write text {self.number + 1}", written, self.length - 1),
        )
        np.save(folder / TOKENS, tokens)
        return None


@dataclass(frozen=True, slots=True)
class LayerPiece(Piece):
    """The quantized matrices of a layer, the ranges of its results, and the residual after it.

    Attributes:
        folded: the decoder, and its calibration text.
        layer: its number.
        rules: of its matrices.
        follows: whether the quantized decoder runs beside the exact one.
        before: name of the layer before; None for the first.
        shared: names of the pieces with keys and values of other layers that it reads.
    """

    kind: ClassVar[str] = "layer"

    folded: Folded
    layer: int
    rules: tuple[WeightRecord, ...]
    follows: bool
    before: str | None
    shared: tuple[str, ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        return (*self.folded.needs, *(() if self.before is None else (self.before,)), *self.shared)

    def make(self, folder: Path, inputs: Inputs) -> object:
        quantizer = inputs.take_quantizer(self.folded, recipe_of(self.rules), self.before, follows=self.follows)
        for name in self.shared:
            quantizer.share(inputs.layer(name).shared())
        matrices, ranges = dict(quantizer.layer(self.layer)), quantizer.take_ranges()
        shared = quantizer.shared_rows(self.layer)
        LayerFile.write(folder / LAYER, matrices, ranges, quantizer.hidden, shared)
        inputs.keep(self.name, folder, quantizer)
        return None


@dataclass(frozen=True, slots=True)
class HeadPiece(Piece):
    """The quantized matrices behind the layers; see `LayerPiece`."""

    kind: ClassVar[str] = "head"

    folded: Folded
    rules: tuple[WeightRecord, ...]
    follows: bool
    before: str

    @property
    def needs(self) -> tuple[str, ...]:
        return (*self.folded.needs, self.before)

    def make(self, folder: Path, inputs: Inputs) -> object:
        quantizer = inputs.take_quantizer(self.folded, recipe_of(self.rules), self.before, follows=self.follows)
        matrices = dict(quantizer.head())
        LayerFile.write(folder / LAYER, matrices, quantizer.take_ranges(), None)
        inputs.keep(self.name, folder, None)
        return None


@dataclass(frozen=True, slots=True)
class RangesPiece(Piece):
    """The ranges of all results of the exact decoder with an adapter.

    Attributes:
        folded: the decoder, and its calibration text.
        adapter: what runs beside its matrices.
    """

    kind: ClassVar[str] = "ranges"

    folded: Folded
    adapter: ProvenAdapter

    @property
    def needs(self) -> tuple[str, ...]:
        return self.folded.needs

    def make(self, folder: Path, inputs: Inputs) -> object:
        tensors, surveyed = inputs.folded(self.folded), inputs.surveyed(self.folded)
        changes, told = inputs.changes(self.adapter, self.folded.exact, tensors), partial(inputs.progress, "adapter")
        sink, context = surveyed.sink_tokens, self.folded.exact.context
        tokens = surveyed.tokens[::_ADAPTED_WINDOWS]
        ranges = adapted_ranges(tensors, changes, tokens, context, sink, told)
        LayerFile.write(folder / LAYER, {}, ranges, None)
        return None


@dataclass(frozen=True, slots=True)
class WritePiece(Piece):
    """Graphs, weights and manifest: a bundle for no chip yet, which no compiler has checked.

    Attributes:
        folded: the decoder, and its calibration text.
        identity: the checkpoint, with its tokenizer, templates and sampling defaults.
        source: the checkpoint's name in the manifest.
        calibration: name of the calibration text there.
        merged: adapters that are part of the weights.
        form: the graphs.
        adapters: that the slots are calibrated on.
        adapted: names of their ranges.
        layers: names of the quantized layers and of the head.
        encoder: name of the vision encoder; None if there is none.
    """

    kind: ClassVar[str] = "write"

    folded: Folded
    identity: Identity
    source: str
    calibration: str
    merged: tuple[AdapterRecord, ...]
    form: BundleForm
    adapters: tuple[ProvenAdapter, ...]
    adapted: tuple[str, ...]
    layers: tuple[str, ...]
    encoder: str | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        encoder = () if self.encoder is None else (self.encoder,)
        return (*self.folded.needs, *self.layers, *self.adapted, *encoder)

    def make(self, folder: Path, inputs: Inputs) -> object:
        checkpoint, surveyed = inputs.checkpoint(self.folded.exact, self.identity), inputs.surveyed(self.folded)
        for adapter in self.adapters:
            adapter.checked()
        stored = stored_record(checkpoint, Recipe.of(self.form.recipe), partial(inputs.progress, "compare integers"))
        layers = [inputs.layer(name) for name in self.layers]
        for layer, wanted in zip(layers, layer_matrices(checkpoint.spec), strict=True):
            layer.check(wanted)
        ranges = {name: seen for layer in layers for name, seen in layer.ranges().items()}
        for adapted in self.adapted:
            for name, seen in inputs.layer(adapted).ranges().items():
                ranges[name].cover(seen)
        bundle, tensors = folder / BUNDLE, inputs.folded(self.folded)
        bundle.mkdir()
        told, matrices = inputs.progress, LayerMatrices(layers)
        vision = embedded = None
        if self.encoder is not None:
            vision = inputs.store.answer(self.encoder, Encoded)
            for name in (vision.file, *vision.weights.files):
                link_or_copy(inputs.store.path(self.encoder) / name, bundle / name)
            embedded = Range(vision.low, vision.high)
        contents = write_contents(
            checkpoint, self.form, surveyed, tensors, matrices, ranges, bundle, told, embedded=embedded
        )
        del ranges
        learned = sum(inputs.tokens(name).size for name in self.folded.learned)
        source = SourceRecord(
            checkpoint=self.source,
            weights_sha256=self.identity.weights,
            calibration=self.calibration,
            calibration_tokens=surveyed.tokens.size,
            stored=stored,
            adapters=list(self.merged),
            generated_tokens=learned,
        )
        files = record_files(bundle, partial(inputs.progress, "hash files"))
        manifest = make_manifest(checkpoint, self.form, surveyed, contents, source, files)
        if vision is not None:
            manifest = msgspec.structs.replace(manifest, vision=vision.record)
        write_manifest(bundle, manifest)
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


class Compiled(CompiledBinary, frozen=True, kw_only=True):
    """A binary, the float nodes of each file in it, and the peak RAM of its compiler, if that is known."""

    floating: dict[str, list[str]]
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class CompilePiece(Piece):
    """A context binary for a chip, checked for float nodes in the same run; answers `Compiled`.

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

    def make(self, folder: Path, inputs: Inputs) -> Compiled:
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
        return Compiled(
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
        found = simulate([place / file for file in self.files], find_proxy(self.proxy), self.htp)
        (folder / SCHEDULES).write_bytes(msgspec.msgpack.encode([each.schedule for each in found]))
        return [each.costs for each in found]


@dataclass(frozen=True, slots=True)
class CompileTflitePiece(Piece):
    """A `.tflite` file whose graphs call one context for a chip; answers `Compiled`.

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

    def make(self, folder: Path, inputs: Inputs) -> Compiled:
        device, target = find(self.soc), folder / self.file
        compile_tflite(inputs.bundle(self.bundle) / self.file, target, self.graphs, device)
        check_chip(target, device)
        return Compiled(
            file=self.file,
            wrappers=dict.fromkeys(self.graphs, self.file),
            graphs=len(self.graphs),
            optimization=None,
            floating={},
            peak_bytes=None,
        )


def recipe_of(rules: Iterable[WeightRecord]) -> Recipe:
    """A recipe of these rules alone, for pieces that read no others."""
    weights = tuple(WeightRule(tensors=each.tensor, dtype=each.dtype, method=each.method) for each in rules)
    return Recipe(name="", weights=weights, activations="u16", rotation="none")


def layer_matrices(spec: DecoderSpec) -> list[dict[str, tuple[int, int]]]:
    """The matrices `[out, in]` in the file of each layer, and of the head."""
    found: list[dict[str, tuple[int, int]]] = [{} for _ in range(spec.layers + 1)]
    for view in views(spec):
        if view.is_multiplied and view.name != EMBEDDING:
            outputs, inputs = view.shape
            found[spec.layers if view.layer is None else view.layer][view.name] = outputs, inputs
    return found


def read_manifest(store: PieceStore, name: str) -> Manifest:
    """The manifest of a written bundle."""
    with store.reading(name) as folder:
        return open_bundle(folder / BUNDLE, verify=False).manifest


def read_estimate(store: PieceStore, name: str) -> list[Simulation]:
    """What a finished `EstimatePiece` has found, a graph each."""
    costs = store.answer(name, list[Costs])
    schedules = msgspec.msgpack.decode(store.files(name)[SCHEDULES].read_bytes(), type=list[Schedule])
    return [Simulation(*both) for both in zip(costs, schedules, strict=True)]


def read_compiled(store: PieceStore, name: str) -> Compiled:
    """The answer of a finished `CompilePiece`.

    Raises:
        UsageError: it names other files than those of its piece.
    """
    found, files = store.answer(name, Compiled), store.files(name)
    named = {found.file, *found.wrappers.values()}
    if named != {*files}:
        raise UsageError(
            f"piece {name}",
            got=f"a binary of {', '.join(sorted(named))}",
            expected=f"its files {', '.join(files)}",
            fix=f"Remove the piece from {store.place}, and run the same command again.",
        )
    return found
