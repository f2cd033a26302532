"""What a written bundle lost against the float reference, on a little text: pieces that measure read it from here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

import edgekv
from edgekv.bundle import Bundle, QualityRecord, open_bundle
from edgekv.engine.sink import read_sink
from edgekv.load_options import EngineOptions
from edgekv.runtime import make_engine
from edgekv.scratch import scratch_folder
from edgekv.spec import LOGITS, DecoderSpec
from exporters.checkpoint.folded import heads_of, transformed
from exporters.inspect.held_out import MEASURED_TOKENS, ChatTally, ChatWindow, TextName, chat_windows
from exporters.inspect.layers import LayerMeter
from exporters.inspect.probe import Probe
from exporters.inspect.report import LayerLoss
from exporters.inspect.tally import Tally
from exporters.inspect.wikitext import Window, measured_windows
from exporters.pipeline.inputs import TOKENS, Exact, Inputs, SinkChoice
from exporters.pipeline.piece import Piece
from exporters.quantize.calibrate import cut_windows
from exporters.quantize.reference import Floats, Reference, Tensors


@dataclass(frozen=True, slots=True)
class Text:
    """The text on which a sweep measures quality.

    Attributes:
        title: its name.
        content: its content.
        tokens: the most to predict.
    """

    title: str
    content: str
    tokens: int


_PROCESS_BYTES = 250_000_000
_COPIES_OF_WEIGHTS, _COPIES_OF_LOGITS = 3, 3


@dataclass(frozen=True, slots=True)
class EncodePiece(Piece):
    """The token ids of a text, `[1, T]`.

    Attributes:
        exact: the decoder.
        tokenizer: see `Identity`.
        text: name of the text.
    """

    kind: ClassVar[str] = "encode"

    exact: Exact
    tokenizer: str
    text: str

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.text,)

    def make(self, folder: Path, inputs: Inputs) -> object:
        checkpoint = inputs.text_checkpoint(self.exact, self.tokenizer)
        np.save(folder / TOKENS, np.array([checkpoint.encode(inputs.text(self.text))], np.int64))
        return None


@dataclass(frozen=True, slots=True)
class Measured:
    """Windows of a text.

    Attributes:
        exact: the decoder.
        sink: decides how they begin.
        bos: how they begin without a sink.
        context: of the bundle.
        ids: name of the text's token ids.
        title: of the text.
        tokens: number of tokens to predict.
        template: places of the tokens that a chat template has added, if it is a chat.
    """

    exact: Exact
    sink: SinkChoice
    bos: tuple[int, ...]
    context: int
    ids: str
    title: str
    tokens: int
    template: tuple[int, ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the pieces that it follows from."""
        return self.sink.survey, self.ids

    def windows(self, inputs: Inputs) -> list[Window]:
        """Those that `edgekv eval` measures: of the context length, with `tokens` predicted tokens in all."""
        ids, sink = self._read(inputs)
        return measured_windows(cut_windows(ids, self.context, sink or self.bos), sink, self.tokens)

    def chat_windows(self, inputs: Inputs) -> list[ChatWindow]:
        """The same, of a chat."""
        ids, sink = self._read(inputs)
        return chat_windows(ids, self.template, self.context, sink or self.bos, self.tokens)

    def _read(self, inputs: Inputs) -> tuple[list[int], tuple[int, ...]]:
        """The token ids, and the sink."""
        has_sink = self.sink.chooses(inputs.survey(self.sink.survey, self.exact))
        (ids,) = inputs.tokens(self.ids).tolist()
        return ids, self.sink.first if has_sink else ()


@dataclass(frozen=True, slots=True)
class ReferencePiece(Piece):
    """Logits of the float32 reference, a file for each window.

    Attributes:
        measured: the texts.
    """

    kind: ClassVar[str] = "reference"

    measured: tuple[Measured, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(name for each in self.measured for name in each.needs)

    def make(self, folder: Path, inputs: Inputs) -> object:
        windows = [window.inputs for each in self.measured for window in each.windows(inputs)]
        reference = Reference(inputs.exact(self.measured[0].exact), self.measured[0].context)
        store_logits(reference.logits(windows), folder)
        return None


def store_logits(logits: Iterable[Floats], folder: Path) -> None:
    """Write the logits of windows, a file for each."""
    for number, each in enumerate(logits):
        np.save(folder / f"{number}.npy", each)


@dataclass(frozen=True, slots=True)
class StoredLogits:
    """Logits that `store_logits` has written."""

    folder: Path

    def logits(self, windows: Sequence[NDArray[np.int64]], /) -> Iterator[Floats]:
        """Yield the logits `[T, V]` of each window."""
        for number in range(len(windows)):
            yield np.load(self.folder / f"{number}.npy")


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """What a bundle lost.

    Attributes:
        records: on each text.
        layers: in each layer, if it was asked for.
    """

    records: tuple[QualityRecord, ...]
    layers: tuple[LayerLoss, ...] = ()


@dataclass(frozen=True, slots=True)
class QualityPiece(Piece):
    """What a bundle lost on prose, and on a chat if the checkpoint has a template; answers `Quality`.

    ONNX graphs run as the HTP computes them, one layer in memory at a time.

    Attributes:
        bundle: name of the written bundle.
        texts: what is measured.
        reference: name of the reference's logits, which several bundles share; None to compute them here.
        by_layer: the text on which each layer of ONNX graphs is measured too; None for none.
    """

    kind: ClassVar[str] = "quality"

    bundle: str
    texts: tuple[tuple[TextName, Measured], ...]
    reference: str | None = None
    by_layer: Measured | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        shared = () if self.reference is None else (self.reference,)
        measured = [each for _, each in self.texts] + ([] if self.by_layer is None else [self.by_layer])
        return self.bundle, *shared, *(name for each in measured for name in each.needs)

    def make(self, folder: Path, inputs: Inputs) -> Quality:
        prose = [window for name, each in self.texts if name == "prose" for window in each.windows(inputs)]
        chat = [window for name, each in self.texts if name == "chat" for window in each.chat_windows(inputs)]
        every: list[Window | ChatWindow] = [*prose, *chat]
        windows = [each.window.inputs if isinstance(each, ChatWindow) else each.inputs for each in every]
        bundle = open_bundle(inputs.bundle(self.bundle), verify=False)
        run = _TracedRun(bundle, inputs.threads, *self._by_layer(bundle, inputs))
        tally, of_chat = Tally(), ChatTally()
        with scratch_folder("quality") as scratch:
            # One head in memory at a time: all logits of the reference come first.
            exact = self._exact(windows, bundle, inputs, scratch).logits(windows)
            for window, expected, found in zip(every, exact, run.logits(windows), strict=True):
                if isinstance(window, ChatWindow):
                    of_chat.add(window, expected, found)
                else:
                    tally.add(window, expected, found)
        self._told(inputs, bundle, 2 * bundle.manifest.model.layers)
        of_prose = (tally.record("prose"),) if tally else ()
        return Quality(records=(*of_prose, *of_chat.records), layers=tuple(run.losses))

    def _exact(
        self, windows: Sequence[NDArray[np.int64]], bundle: Bundle, inputs: Inputs, scratch: Path
    ) -> StoredLogits:
        if self.reference is not None:
            return StoredLogits(inputs.store.path(self.reference))
        if windows:
            measured = self.texts[0][1]
            reference = Reference(inputs.exact(measured.exact), measured.context)
            store_logits(reference.logits(windows, progress=partial(self._told, inputs, bundle)), scratch)
        return StoredLogits(scratch)

    def _by_layer(self, bundle: Bundle, inputs: Inputs) -> tuple[Tensors | None, list[Window]]:
        if self.by_layer is None:
            return None, []
        manifest, exact = bundle.manifest, self.by_layer.exact.with_vocabulary(bundle.manifest.model.vocabulary)
        tensors = transformed(inputs.exact(exact), manifest.recipe, heads_of(bundle))
        return tensors, self.by_layer.windows(inputs)

    def _told(self, inputs: Inputs, bundle: Bundle, layers: int) -> None:
        inputs.progress("measure", layers, 2 * bundle.manifest.model.layers)


def quality_bytes(spec: DecoderSpec, context: int) -> int:
    """RAM that a `QualityPiece` takes: the head while it is loaded, and logits of a window from both models."""
    window = min(context, MEASURED_TOKENS["prose"] + 1)
    largest = max(spec.sizes.layer_parameters, spec.sizes.table_parameters)
    return _PROCESS_BYTES + _COPIES_OF_WEIGHTS * 4 * largest + _COPIES_OF_LOGITS * 4 * window * spec.vocab


class _TracedRun:
    """A bundle that runs, one layer at a time if it has ONNX graphs.

    Args:
        bundle: what runs.
        threads: of the engine.
        tensors: the exact weights, with all that is folded into the bundle's; None to measure no layer.
        by_layer: the windows on which each layer is measured.

    Attributes:
        losses: of the layers, once all logits were given.
    """

    def __init__(self, bundle: Bundle, threads: int | None, tensors: Tensors | None, by_layer: list[Window]) -> None:
        self.losses: list[LayerLoss] = []
        self._bundle = bundle
        self._threads = threads
        self._tensors = tensors
        self._by_layer = by_layer

    def logits(self, windows: Sequence[NDArray[np.int64]]) -> Iterator[Floats]:
        """The logits `[T, V]` of each window."""
        if self._bundle.manifest.graph_format == "onnx":
            yield from self._probed(windows)
            return
        with edgekv.load(self._bundle, engine="litert", threads=self._threads) as model:
            for window in windows:
                yield model.score(window.tolist())

    def _probed(self, windows: Sequence[NDArray[np.int64]]) -> Iterator[Floats]:
        bundle, measured = self._bundle, self._by_layer
        manifest, sink = bundle.manifest, read_sink(bundle)
        probe = Probe(bundle, make_engine(bundle, EngineOptions(threads=self._threads)))
        meter = None if self._tensors is None else LayerMeter(bundle, probe.first, self._tensors, measured)
        restored = [] if sink is None else [manifest.encodings[LOGITS].dequantize(sink.logits)]
        stages = probe.stages([*(window.inputs for window in measured), *windows])
        for stage in range(manifest.model.layers + 1):
            found = [*islice(stages, len(measured))]
            if meter is not None:
                meter.add(found)
            del found
            for trace in islice(stages, len(windows)):
                if stage == manifest.model.layers:
                    yield np.concatenate([*restored, trace["logits"]])
        if meter is not None:
            self.losses = meter.losses
