"""What a written bundle lost against the float reference, on a little text: pieces that measure read it from here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

import edgekv
from edgekv.bundle import Bundle, QualityRecord, open_bundle
from edgekv.engine.sink import read_sink
from edgekv.errors import UsageError
from edgekv.load_options import EngineOptions
from edgekv.runtime import make_engine
from edgekv.spec import LOGITS, DecoderSpec
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.inspect.probe import Probe
from exporters.inspect.tally import Evaluation, Tally
from exporters.inspect.wikitext import Window, measured_windows
from exporters.pipeline.inputs import TOKENS, Exact, Inputs, SinkChoice
from exporters.pipeline.piece import Piece
from exporters.quantize.calibrate import cut_windows
from exporters.quantize.reference import Floats, Reference

TextName = Literal["prose", "chat"]
MEASURED_TOKENS: dict[TextName, int] = {"prose": 512, "chat": 256}
"""Predicted tokens of each text."""

_PROCESS_BYTES = 250_000_000
_COPIES_OF_WEIGHTS, _COPIES_OF_LOGITS = 3, 4
_PROSE, _CHAT = "held_out.txt", "held_out_chat.json"


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
    """

    exact: Exact
    sink: SinkChoice
    bos: tuple[int, ...]
    context: int
    ids: str
    title: str
    tokens: int

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the pieces that it follows from."""
        return self.sink.survey, self.ids

    def windows(self, inputs: Inputs) -> list[Window]:
        """Those that `edgekv eval` measures: of the context length, with `tokens` predicted tokens in all."""
        has_sink = self.sink.chooses(inputs.survey(self.sink.survey, self.exact))
        (ids,) = inputs.tokens(self.ids).tolist()
        windows = cut_windows(ids, self.context, self.sink.first if has_sink else self.bos)
        return measured_windows(windows, self.sink.first if has_sink else (), self.tokens)


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
        for number, logits in enumerate(reference.logits(windows)):
            np.save(folder / f"{number}.npy", logits)
        return None


@dataclass(frozen=True, slots=True)
class StoredLogits:
    """Logits that `ReferencePiece` has written."""

    folder: Path

    def logits(self, windows: Sequence[NDArray[np.int64]], /) -> Iterator[Floats]:
        """Yield the logits `[T, V]` of each window."""
        for number in range(len(windows)):
            yield np.load(self.folder / f"{number}.npy")


@dataclass(frozen=True, slots=True)
class QualityPiece(Piece):
    """What a bundle lost on prose, and on a chat if the checkpoint has a template; answers a list of `QualityRecord`.

    ONNX graphs run as the HTP computes them, one layer in memory at a time.

    Attributes:
        bundle: name of the written bundle.
        texts: what is measured.
        reference: name of the reference's logits, which several bundles share; None to compute them here.
    """

    kind: ClassVar[str] = "quality"

    bundle: str
    texts: tuple[tuple[TextName, Measured], ...]
    reference: str | None

    @property
    def needs(self) -> tuple[str, ...]:
        shared = () if self.reference is None else (self.reference,)
        return self.bundle, *shared, *(name for _, measured in self.texts for name in measured.needs)

    def make(self, folder: Path, inputs: Inputs) -> list[QualityRecord]:
        measured = self.texts[0][1]
        named = [(name, window) for name, each in self.texts for window in each.windows(inputs)]
        windows = [window.inputs for _, window in named]
        bundle = open_bundle(inputs.bundle(self.bundle), verify=False)
        if self.reference is None:
            reference = Reference(inputs.exact(measured.exact), measured.context)
            exact = reference.logits(windows, progress=partial(self._told, inputs, bundle))
        else:
            exact = StoredLogits(inputs.store.path(self.reference)).logits(windows)
        tallies: dict[TextName, Tally] = {}
        for (name, window), expected, found in zip(named, exact, _logits(bundle, windows, inputs.threads), strict=True):
            tallies.setdefault(name, Tally()).add(window, expected, found)
        self._told(inputs, bundle, 2 * bundle.manifest.model.layers)
        return [_record(name, tally.evaluation("", "")) for name, tally in tallies.items()]

    def _told(self, inputs: Inputs, bundle: Bundle, layers: int) -> None:
        inputs.progress("measure", layers, 2 * bundle.manifest.model.layers)


def held_out_texts(checkpoint: Checkpoint) -> dict[TextName, str]:
    """The texts that a `QualityPiece` measures; no chat if the checkpoint has no template, or one that refuses it.

    No model is calibrated on them.
    """
    files, found = resources.files("exporters.quantize"), dict[TextName, str]()
    found["prose"] = files.joinpath(_PROSE).read_text("utf-8")
    if checkpoint.chat is not None:
        messages = msgspec.json.decode(files.joinpath(_CHAT).read_bytes(), type=list[dict[str, str]])
        with suppress(UsageError):
            found["chat"] = checkpoint.chat.render(messages, add_generation_prompt=False)
    return found


def quality_bytes(spec: DecoderSpec, context: int) -> int:
    """RAM that a `QualityPiece` takes: the head in float, and logits of a window from both models."""
    window = min(context, MEASURED_TOKENS["prose"] + 1)
    largest = max(spec.sizes.layer_parameters, spec.sizes.table_parameters)
    return _PROCESS_BYTES + _COPIES_OF_WEIGHTS * 4 * largest + _COPIES_OF_LOGITS * 4 * window * spec.vocab


def _logits(bundle: Bundle, windows: Sequence[NDArray[np.int64]], threads: int | None) -> Iterator[Floats]:
    """The bundle's logits `[T, V]` of each window."""
    manifest = bundle.manifest
    if manifest.graph_format == "onnx":
        sink, encoding = read_sink(bundle), manifest.encodings[LOGITS]
        restored = [] if sink is None else [encoding.dequantize(sink.logits)]
        stages = Probe(bundle, make_engine(bundle, EngineOptions(threads=threads))).stages(windows)
        for trace in islice(stages, manifest.model.layers * len(windows), None):
            yield np.concatenate([*restored, trace["logits"]])
        return
    with edgekv.load(bundle, engine="litert", threads=threads) as model:
        for window in windows:
            yield model.score(window.tolist())


def _record(name: TextName, found: Evaluation) -> QualityRecord:
    """Rounded, so that threads and processors hardly change a manifest."""
    return QualityRecord(
        text=name,
        tokens=found.tokens,
        kl_nats=_rounded(found.kl_nats),
        kl_most_nats=_rounded(found.kl_most_nats),
        top1_agreement=round(found.top1_agreement, 4),
        least_token_sqnr_db=round(found.least_token_sqnr_db, 1),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
