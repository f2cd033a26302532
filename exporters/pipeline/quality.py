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
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

import edgekv
from edgekv.bundle import Bundle, QualityRecord, open_bundle
from edgekv.graphs.decoder import layer_result
from edgekv.graphs.processor import processors
from edgekv.machine.scratch import scratch_folder
from edgekv.runtime import make_engine
from edgekv.runtime.load_options import EngineOptions
from edgekv.spec import DecoderSpec
from exporters.checkpoint.columns import blocks_of_rows
from exporters.checkpoint.folded import heads_of, transformed
from exporters.checkpoint.tensors import Tensors
from exporters.inspect.head import BundleHead
from exporters.inspect.held_out import MEASURED_TOKENS, ChatTally, ChatWindow, TextName, chat_windows
from exporters.inspect.layers import LayerMeter
from exporters.inspect.probe import Probe
from exporters.inspect.report import LayerLoss
from exporters.inspect.tally import Tally, TokenSums
from exporters.inspect.wikitext import Window, measured_windows
from exporters.pipeline.inputs import TOKENS, DecoderKey, Inputs
from exporters.pipeline.piece import Piece
from exporters.quantize.calibrate import cut_windows
from exporters.quantize.reference import WINDOWS_AT_ONCE, Floats, Reference


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
_COPIES_OF_WEIGHTS = 3


@dataclass(frozen=True, slots=True)
class EncodePiece(Piece):
    """The token ids of a text, `[1, T]`.

    Attributes:
        exact: the decoder.
        tokenizer: see `Identity`.
        text: name of the text.
    """

    kind: ClassVar[str] = "encode"

    exact: DecoderKey
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
class QualityWindows:
    """Windows of a text.

    Attributes:
        decoder: the exact one; its sink decides how they begin.
        bos: how they begin without a sink.
        context: of the bundle.
        ids: name of the text's token ids.
        title: of the text.
        tokens: number of tokens to predict.
        template: places of the tokens that a chat template has added, if it is a chat.
    """

    decoder: DecoderKey
    bos: tuple[int, ...]
    context: int
    ids: str
    title: str
    tokens: int
    template: tuple[int, ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the pieces that it follows from."""
        return (*self.decoder.needs, self.ids)

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
        (ids,) = inputs.tokens(self.ids).tolist()
        return ids, inputs.beginning(self.decoder, ())[0]


@dataclass(frozen=True, slots=True)
class ReferencePiece(Piece):
    """Logits of the float32 reference, a file for each window.

    Attributes:
        measured: the texts.
    """

    kind: ClassVar[str] = "reference"

    measured: tuple[QualityWindows, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(name for quality in self.measured for name in quality.needs)

    def make(self, folder: Path, inputs: Inputs) -> object:
        windows = [window.inputs for quality in self.measured for window in quality.windows(inputs)]
        measured = self.measured[0]
        reference, vocab = (
            Reference(inputs.exact(measured.decoder), measured.context),
            measured.decoder.spec.result_width,
        )
        states = reference.states(windows)
        mapped = list[Floats]()
        for number, window in enumerate(windows):
            file, shape = folder / f"{number}.npy", (len(window), vocab)
            mapped.append(open_memmap(file, "w+", np.float32, shape))  # type: ignore[no-untyped-call]
        for rows, blocks in zip(blocks_of_rows(vocab), reference.head_blocks(states), strict=True):
            for logits, block in zip(mapped, blocks, strict=True):
                logits[:, rows] = block
        return None


def store_logits(logits: Iterable[Floats], folder: Path) -> None:
    """Write the logits of windows, a file for each."""
    for number, rows in enumerate(logits):
        np.save(folder / f"{number}.npy", rows)


@dataclass(frozen=True, slots=True)
class StoredLogits:
    """Logits that `store_logits` has written."""

    folder: Path

    def logits(self, windows: Sequence[NDArray[np.int64]], /) -> Iterator[Floats]:
        """Yield the logits `[T, V]` of each window."""
        for number in range(len(windows)):
            yield np.load(self.folder / f"{number}.npy")

    def blocks(self, windows: Sequence[NDArray[np.int64]], vocab: int) -> Iterator[list[Floats]]:
        """The logits `[T, rows]` of every window, for some rows of the vocabulary after the others."""
        mapped = [np.load(self.folder / f"{number}.npy", mmap_mode="r") for number in range(len(windows))]
        return ([np.array(memory[:, rows]) for memory in mapped] for rows in blocks_of_rows(vocab))


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
    texts: tuple[tuple[TextName, QualityWindows], ...]
    reference: str | None = None
    by_layer: QualityWindows | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        shared = () if self.reference is None else (self.reference,)
        measured = [text for _, text in self.texts] + ([] if self.by_layer is None else [self.by_layer])
        return self.bundle, *shared, *(name for text in measured for name in text.needs)

    def make(self, folder: Path, inputs: Inputs) -> Quality:
        prose = [window for name, text in self.texts if name == "prose" for window in text.windows(inputs)]
        chat = [window for name, text in self.texts if name == "chat" for window in text.chat_windows(inputs)]
        every = [*prose, *(read.window for read in chat)]
        windows, sums = [part.inputs for part in every], [TokenSums(part) for part in every]
        bundle = open_bundle(inputs.bundle(self.bundle), verify=False)
        run = TracedRun(bundle, inputs.threads, *self._by_layer(bundle, inputs))
        with scratch_folder("quality") as scratch:
            exact = self._exact(windows, bundle, inputs) if windows else ()
            actual_blocks = run.blocks(windows, scratch)
            for expected, actual in zip(exact, actual_blocks, strict=True):
                for token_sums, one, other in zip(sums, expected, actual, strict=True):
                    token_sums.add(one, other)
        self._told(inputs, bundle, 2 * bundle.manifest.model.layers)
        tally, of_chat = Tally(), ChatTally()
        for of_prose in sums[: len(prose)]:
            tally.add_sums(of_prose)
        for window, of_window in zip(chat, sums[len(prose) :], strict=True):
            of_chat.add_sums(window, of_window)
        records = (tally.record("prose"),) if tally else ()
        short = self._short_texts(prose, bundle, inputs)
        return Quality(records=(*records, *of_chat.records, *short), layers=tuple(run.losses))

    def _short_texts(self, windows: Sequence[Window], bundle: Bundle, inputs: Inputs) -> tuple[QualityRecord, ...]:
        """How far the float model is from itself on texts that would be rotated otherwise on their own, if any are."""
        most = bundle.manifest.model.shorter_texts(bundle.manifest.context)
        if most is None or not windows:
            return ()
        cut = [Window(window.inputs[:most], window.targets[: most - window.first], window.first) for window in windows]
        ids, exact = [window.inputs for window in cut], inputs.exact(self.texts[0][1].decoder)
        by_length = (Reference(exact, context) for context in (most, bundle.manifest.context))
        tally, sums = Tally(), [TokenSums(window) for window in cut]
        blocks = (reference.head_blocks(reference.states(ids)) for reference in by_length)
        for expected, actual in zip(*blocks, strict=True):
            for token_sums, one, other in zip(sums, expected, actual, strict=True):
                token_sums.add(one, other)
        for token_sums in sums:
            tally.add_sums(token_sums)
        return (tally.record("short"),)

    def _exact(self, windows: Sequence[NDArray[np.int64]], bundle: Bundle, inputs: Inputs) -> Iterator[list[Floats]]:
        """The reference's logits of every window, for some rows of the vocabulary after the others."""
        if self.reference is not None:
            stored = StoredLogits(inputs.store.path(self.reference))
            return stored.blocks(windows, bundle.manifest.model.result_width)
        measured = self.texts[0][1]
        reference = Reference(inputs.exact(measured.decoder), measured.context)
        return reference.head_blocks(reference.states(windows, progress=partial(self._told, inputs, bundle)))

    def _by_layer(self, bundle: Bundle, inputs: Inputs) -> tuple[Tensors | None, list[Window]]:
        if self.by_layer is None:
            return None, []
        manifest, exact = bundle.manifest, self.by_layer.decoder.with_vocabulary(bundle.manifest.model.vocabulary)
        tensors = transformed(inputs.exact(exact), manifest.recipe, heads_of(bundle))
        return tensors, self.by_layer.windows(inputs)

    def _told(self, inputs: Inputs, bundle: Bundle, layers: int) -> None:
        inputs.progress("measure", layers, 2 * bundle.manifest.model.layers)


def quality_bytes(spec: DecoderSpec) -> int:
    """RAM that a `QualityPiece` takes: a layer while it is loaded, and the integers of the head, which are mapped."""
    layer = _COPIES_OF_WEIGHTS * 4 * spec.sizes.layer_parameters
    return _PROCESS_BYTES + layer + spec.sizes.table_parameters


def reference_bytes(spec: DecoderSpec, context: int) -> int:
    """RAM that a `ReferencePiece` takes: a layer, or some rows of the head; the logits are mapped."""
    rows: int = next(blocks_of_rows(spec.result_width)).stop
    largest = max(spec.sizes.layer_parameters, rows * (spec.hidden + min(context, MEASURED_TOKENS["prose"] + 1)))
    return _PROCESS_BYTES + _COPIES_OF_WEIGHTS * 4 * largest


class TracedRun:
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

    def blocks(self, windows: Sequence[NDArray[np.int64]], scratch: Path) -> Iterator[list[Floats]]:
        """The logits `[T, rows]` of every window, for some rows of the vocabulary after the others.

        Args:
            windows: token ids.
            scratch: a folder for logits.
        """
        manifest = self._bundle.manifest
        if manifest.graph_format == "onnx":
            states = self._states(windows)
            return BundleHead(self._bundle).blocks(states) if windows else iter(())
        with edgekv.load(self._bundle, engine="litert", threads=self._threads) as model:
            store_logits((model.score(window.tolist()) for window in windows), scratch)
        return StoredLogits(scratch).blocks(windows, manifest.model.result_width) if windows else iter(())

    def _states(self, windows: Sequence[NDArray[np.int64]]) -> list[Floats]:
        """What the last layer gives for each window, `[T - first, hidden]`; layers are measured meanwhile."""
        bundle, measured = self._bundle, self._by_layer
        spec = bundle.manifest.model
        # Threads of one operation wait actively for each other; windows side by side do not.
        at_once = max(1, min(len(measured) + len(windows), WINDOWS_AT_ONCE))
        threads = max(1, (self._threads or processors()) // at_once)
        probe = Probe(bundle, make_engine(bundle, EngineOptions(threads=threads)), at_once=at_once)
        meter = None if self._tensors is None else LayerMeter(bundle, probe.first, self._tensors, measured)
        states = list[Floats]()
        stages = probe.stages([*(window.inputs for window in measured), *windows])
        for stage in range(spec.layers + 1):
            traces = [*islice(stages, len(measured))]
            if meter is not None:
                meter.add(traces)
            del traces
            if stage == spec.layers:
                break  # the head's graph holds all of it
            for trace in islice(stages, len(windows)):
                if stage == spec.layers - 1:
                    states.append(trace[layer_result(spec, stage)])
        if meter is not None:
            self.losses = meter.losses
        return states
