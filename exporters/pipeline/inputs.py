"""What pieces read: the checkpoint, proven by its hashes, and the files of finished pieces."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import RecipeRecord
from edgekv.errors import CheckpointError, UsageError
from edgekv.kv import KvDtype
from edgekv.machine.system import link_or_copy
from edgekv.spec import DecoderSpec, Vocabulary
from exporters.checkpoint.aligned import AlignedHeads, align
from exporters.checkpoint.checkpoint import Checkpoint, PicturedRows
from exporters.checkpoint.folded import transformed
from exporters.checkpoint.head_range import HeadRange
from exporters.checkpoint.lora import Adapter, AdapterChoice
from exporters.checkpoint.tensors import Tensors
from exporters.checkpoint.vision import VisionEncoder
from exporters.drafter import Drafter, TargetText
from exporters.lora.base import ExportedBase
from exporters.lora.quantize import folded_factors
from exporters.pipeline.hashed import hashed
from exporters.pipeline.layer_file import LayerFile
from exporters.pipeline.place import Identity, Place, tokenizer_sha256
from exporters.pipeline.store import MissingPieceError, PieceStore
from exporters.pipeline.survey_file import read_survey
from exporters.progress import Progress, silent
from exporters.quantize.matrices import Quantizer
from exporters.quantize.recipe import Recipe
from exporters.quantize.reference import Changes
from exporters.quantize.sink import FloatSink, is_sink
from exporters.quantize.sink_request import SinkRequest
from exporters.quantize.survey import Survey
from exporters.quantize.windows import Room

BUNDLE = "bundle"
LAYER = "layer"
TEXT = "text.txt"
TOKENS = "tokens.npy"
PICTURE_ROWS = "rows.npz"
_MAX_KEPT = 4  # decoders of a process


@dataclass(frozen=True, slots=True)
class DecoderKey:
    """What the pieces of a decoder depend on: its weights, what is folded into them, and its calibration text.

    Attributes:
        weights: see `Identity`.
        config: see `Identity`.
        spec: the decoder, with all that options changed in it.
        context: of the rotary embedding.
        target: see `Identity`.
        pictures: name of the encoder whose float rows of drawn pictures follow the table of embeddings; None for none.
        survey: name of the survey that decides on the sink and on the heads, or of what a drafter reads of its target;
            None for the exact decoder.
        sink: the option.
        first: the tokens that may become a sink.
        transforms: the recipe's, without its rules; None: nothing is folded into the weights.
        kv_dtype: integer type of the cache that heads are aligned for; None if they are not.
        adapted: names of surveys with adapters, for which the heads are aligned too.
        tokens: names of the calibration tokens: with the sink at the start of each window, and without.
        learned: names of the text that the model writes itself.
    """

    weights: str
    config: str
    spec: DecoderSpec
    context: int
    target: str = ""
    pictures: str | None = None
    survey: str | None = None
    sink: SinkRequest = field(default_factory=SinkRequest)
    first: tuple[int, ...] = ()
    transforms: RecipeRecord | None = None
    kv_dtype: KvDtype | None = None
    adapted: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    learned: tuple[str, ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the pieces that it follows from."""
        named = (name for name in (self.survey, self.pictures) if name is not None)
        return (*named, *self.adapted, *self.tokens, *self.learned)

    @property
    def exact(self) -> DecoderKey:
        """The exact decoder: no survey, and nothing folded into the weights."""
        return DecoderKey(self.weights, self.config, self.spec, self.context, self.target, self.pictures)

    @property
    def alone(self) -> DecoderKey:
        """With a vocabulary that no recipe chose: the same logits to the bit, so all recipes share pieces."""
        return self.with_vocabulary("apart")

    @property
    def of_text(self) -> DecoderKey:
        """The exact decoder alone, without pictures, and its sink: how texts begin."""
        exact = replace(self.exact.alone, pictures=None)
        return replace(exact, survey=self.survey, sink=self.sink, first=self.first)

    def with_vocabulary(self, vocabulary: Vocabulary) -> DecoderKey:
        """With embeddings that are elsewhere; see `DecoderSpec.vocabulary`."""
        return replace(self, spec=msgspec.structs.replace(self.spec, vocabulary=vocabulary))


@dataclass(frozen=True, slots=True)
class SurveyResult:
    """What the pass of the exact decoder decides.

    Attributes:
        sink: the first tokens in float, if they become a sink.
        heads: transforms of single heads, if the recipe aligns them.
        tokens: ids of the calibration text `[windows, T]`.
        sink_tokens: number of first tokens of each window that no graph computes.
    """

    sink: FloatSink | None
    heads: AlignedHeads | None
    tokens: NDArray[np.int64]
    sink_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ProvenAdapter:
    """A LoRA adapter, compared with its hash when it is opened."""

    choice: AdapterChoice
    sha256: str

    @classmethod
    def of(cls, choice: AdapterChoice) -> ProvenAdapter:
        """The adapter as it is now."""
        return cls(AdapterChoice(choice.folder.absolute(), choice.scale), Adapter.open(choice).sha256)

    def checked(self) -> AdapterChoice:
        """The adapter, compared.

        Raises:
            CheckpointError: it is missing or another one.
        """
        if (sha256 := Adapter.open(self.choice).sha256) != self.sha256:
            raise CheckpointError(
                f"adapter {self.choice.folder}",
                got=f"another one, sha256 {sha256}",
                expected=f"{self.sha256}, as the command has",
                fix="Give all workers the same files.",
            )
        return self.choice


class Inputs:
    """Gives pieces what their fields name.

    Args:
        store: of finished pieces.
        place: of the checkpoint; None if no piece reads one.
        progress: called by pieces that take long.
        keeps_files: keep the files of layers open, so that clearing the store does no harm; for a process that does
            all pieces.
        keeps_residual: keep the residual of the last layer in memory; for a process that does one piece at a time.
        threads: of an engine that runs a bundle; None for all cores.
        room: in memory for the values of calibration windows; None for none.

    Attributes:
        residual_every: n if every n-th layer and the last one store their residual. Work that goes on behind another
            layer computes the layers since the last stored residual again.
        goes_on: whether this process makes the piece that reads the residual of the layer that it makes now.
    """

    def __init__(
        self,
        store: PieceStore,
        place: Place | None,
        progress: Progress = silent,
        *,
        keeps_files: bool = False,
        keeps_residual: bool = True,
        threads: int | None = None,
        room: Room | None = None,
    ) -> None:
        self.store = store
        self.progress = progress
        self.threads = threads
        self.residual_every = 1
        self.goes_on = True
        self._room = room
        self._place = place
        self._keeps_files = keeps_files
        self._keeps_residual = keeps_residual
        self._layers: dict[str, LayerFile] = {}
        self._quantizer: tuple[str, Quantizer] | None = None
        self._exact: dict[str, tuple[Checkpoint, Checkpoint]] = {}
        self._surveyed: dict[str, SurveyResult] = {}
        self._folded: tuple[str, Tensors, Tensors] | None = None
        self._bundles: dict[str, Path] = {}

    def exact(self, key: DecoderKey) -> Tensors:
        """The weights of the exact decoder, and nothing else of its checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be read, or is another one here.
        """
        return self._decoder(key, weights=key.weights, config=key.config)

    def encoder(self, key: DecoderKey) -> VisionEncoder:
        """The vision encoder of the checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be read, is another one here, or has none.
        """
        encoder = self._decoder(key, weights=key.weights, config=key.config).vision
        if encoder is None:
            raise CheckpointError("vision encoder", got="none", expected="one", fix="Give all workers the same files.")
        return encoder

    def drafter(self, key: DecoderKey) -> Drafter:
        """A drafter and its target.

        Raises:
            CheckpointError: one of them cannot be read, or is another one here.
        """
        assert self._place is not None, "pieces that read a checkpoint have a place"
        return self._place.drafter(weights=key.weights, config=key.config, target=key.target)

    def target_text(self, key: DecoderKey) -> TargetText:
        """What a drafter reads of its target.

        Raises:
            UsageError: it is not there, or damaged.
        """
        assert key.survey is not None, "a drafter reads its target"
        with self.store.reading(key.survey) as folder:
            return TargetText.read(folder, self.drafter(key).read)

    def checkpoint(self, key: DecoderKey, identity: Identity) -> Checkpoint:
        """All of the checkpoint.

        Raises:
            CheckpointError: it cannot be read, or is another one here.
        """
        return self._decoder(key, **{name: getattr(identity, name) for name in Identity.__slots__})

    def take(self, key: DecoderKey, checkpoint: Checkpoint, decoder: Checkpoint) -> None:
        """Take the decoder of a checkpoint that is open here already."""
        self._exact[hashed(replace(key.exact, pictures=None))] = checkpoint, decoder

    def check_values(self, key: DecoderKey) -> None:
        """See `Checkpoint.check_values`."""
        checkpoint = self._decoder(key, weights=key.weights, config=key.config)
        checkpoint.check_values(partial(self.progress, "read"))

    @property
    def adopted(self) -> Collection[str]:
        """Names of the bundles that are read where they are."""
        return self._bundles.keys()

    def adopt(self, name: str, folder: Path) -> None:
        """Read the files of a bundle where it is, instead of from the store."""
        self._bundles[name] = folder

    def bundle(self, name: str) -> Path:
        """The folder of a bundle.

        Raises:
            UsageError: it is not there, or damaged.
        """
        return self._bundles[name] if name in self._bundles else self.store.path(name) / BUNDLE

    def text_checkpoint(self, key: DecoderKey, tokenizer: str) -> Checkpoint:
        """The checkpoint without its chat templates and sampling defaults, for pieces that encode text.

        Args:
            key: the decoder; of a drafter, its target's checkpoint is given.
            tokenizer: see `Identity`.

        Raises:
            CheckpointError: the checkpoint cannot be read, or is another one here.
        """
        if key.target:
            source = self.drafter(key).source
            if (actual := tokenizer_sha256(source)) != tokenizer:
                raise CheckpointError(
                    f"checkpoint {source.name}",
                    got=f"another one, whose tokenizer has the hash {actual}",
                    expected=f"{tokenizer}, as the command has",
                    fix="Give all workers the same files.",
                )
            alone = source.as_spec(msgspec.structs.replace(source.spec, vocabulary="apart"))
            return replace(alone, chat=None, generation=None)
        checkpoint = self._decoder(key, weights=key.weights, config=key.config, tokenizer=tokenizer)
        return replace(checkpoint, chat=None, generation=None)

    def text(self, name: str) -> str:
        """A text that the command has put into the store.

        Raises:
            UsageError: it is not there, or damaged.
        """
        return (self.store.path(name) / TEXT).read_bytes().decode()

    def tokens(self, name: str) -> NDArray[np.int64]:
        """Token ids `[windows, T]` of a finished piece.

        Raises:
            UsageError: they are not there, or no token ids.
        """
        with self.store.reading(name) as folder:
            try:
                tokens: NDArray[np.int64] = np.load(folder / TOKENS, allow_pickle=False)
                if tokens.dtype == np.int64 and tokens.ndim == 2:
                    return tokens
                reason = f"{tokens.dtype} {tokens.shape}"
            except (OSError, ValueError, EOFError) as error:
                reason = str(error)
            fix = f"Remove the piece from {self.store.place}, and run the same command again."
            raise UsageError(f"piece {name}", got=reason, expected="token ids [windows, T]", fix=fix)

    def surveyed(self, key: DecoderKey) -> SurveyResult:
        """What the survey decides."""
        name = hashed(key)
        if name not in self._surveyed:
            if len(self._surveyed) > _MAX_KEPT:
                self._surveyed.clear()
            self._surveyed[name] = self._decided(key)
        return self._surveyed[name]

    def beginning(self, key: DecoderKey, bos: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """The first tokens of each text, and whether they are a sink; those of `bos` are none."""
        assert key.survey is not None, "a survey decides on the sink"
        survey = self._survey(key.survey, key.spec)
        has_sink = survey is not None and is_sink(survey.outlier, key.sink, key.first)
        return (key.first if has_sink else bos), has_sink

    def folded(self, key: DecoderKey) -> Tensors:
        """The weights with all that the recipe folds into them; the last ones are kept."""
        assert key.transforms is not None, "a recipe says what is folded into the weights"
        exact, name = self.exact(key), hashed(key)
        if self._folded is None or self._folded[0] != name or self._folded[1] is not exact:
            self._folded = name, exact, transformed(exact, key.transforms, self.surveyed(key).heads)
        return self._folded[2]

    def changes(self, adapter: ProvenAdapter, key: DecoderKey, tensors: Tensors | None = None) -> Changes:
        """What an adapter adds to the exact decoder.

        Args:
            adapter: the adapter.
            key: the decoder.
            tensors: its weights with what a recipe folds into them; None: without.

        Raises:
            CheckpointError: the adapter is another one here, damaged, or of another model.
        """
        checkpoint = self._decoder(key, weights=key.weights, config=key.config)
        base = ExportedBase(checkpoint, checkpoint if tensors is None else tensors)
        return folded_factors(Adapter.open(adapter.checked()), base)

    def layer(self, name: str) -> LayerFile:
        """A finished layer.

        Raises:
            UsageError: it is not there, or damaged.
        """
        if name in self._layers:
            return self._layers[name]
        with self.store.reading(name) as folder:
            return LayerFile.open(folder / LAYER)

    def give_weights(self, name: str, folder: Path) -> None:
        """Link the files of a layer's weights into the folder of a bundle; copy them if the store was cleared.

        Raises:
            UsageError: they are not there, or damaged.
        """
        layer = self.layer(name)
        try:
            place = self.store.path(name) / LAYER
        except MissingPieceError:
            if name not in self._layers or (self.store.folder / name).exists():
                raise
            for file, content in layer.weights.files.items():
                content.tofile(folder / file)
        else:
            for file in layer.places.files:
                link_or_copy(place / file, folder / file)

    def take_quantizer(
        self, key: DecoderKey, rules: Recipe, before: str | None = None, *, follows: bool = True
    ) -> Quantizer:
        """A quantizer that has run the decoder up to a layer.

        Args:
            key: the decoder.
            rules: of the matrices that come next.
            before: name of the layer; None for the embeddings.
            follows: see `Quantizer`.
        """
        kept, self._quantizer = self._quantizer, None
        if kept is not None and kept[0] == before:
            kept[1].recipe = rules
            return kept[1]
        del kept  # its memory is for the next one
        surveyed = self.surveyed(key)
        quantizer = Quantizer(
            self.folded(key),
            surveyed.tokens,
            key.context,
            rules,
            surveyed.sink_tokens,
            follows=follows,
            folder=self.store.folder,
            room=self._room,
        )
        if before is not None:
            layer = self.layer(before)
            layer.check_residual(quantizer.hidden.shape)
            quantizer.hidden = layer.hidden()
            if key.target:
                quantizer.read_target(self.target_text(key).rows)
            quantizer.take_ranges()  # that of the embedding belongs to the first layer
        return quantizer

    def keep(self, name: str, folder: Path, quantizer: Quantizer | None) -> None:
        """Keep a layer's file open, and the quantizer that made it, for the pieces that follow in this process."""
        if self._keeps_residual and quantizer is not None:
            self._quantizer = name, quantizer
        if self._keeps_files and os.name != "nt":  # Windows renames no folder with an open file
            self._layers[name] = LayerFile.open(folder / LAYER)

    def stores_residual(self, layer: int, layers: int) -> bool:
        """Whether a layer of so many stores the residual after it."""
        goes_on = self.goes_on and self._keeps_residual
        return not goes_on or (layer + 1) % self.residual_every == 0 or layer + 1 == layers

    def release(self) -> None:
        """Free the memory of the last layer."""
        self._quantizer = None

    def _decoder(self, key: DecoderKey, **hashes: str) -> Checkpoint:
        assert self._place is not None, "pieces that read a checkpoint have a place"
        checkpoint, exact = self._place.proven(**{**hashes, "target": key.target}), key.exact
        name = hashed(exact)
        known = self._exact.get(name)
        if known is None or known[0] is not checkpoint:
            if len(self._exact) > _MAX_KEPT:
                self._exact.clear()
            if exact.pictures is None:
                decoder = checkpoint.as_spec(exact.spec)
            else:
                plain = self._decoder(replace(exact, pictures=None), **hashes)
                decoder = plain.with_pictures(self._picture_rows(exact.pictures))
            known = self._exact[name] = checkpoint, decoder
        return known[1]

    def _picture_rows(self, name: str) -> PicturedRows:
        """The float rows that an encoder has found for drawn pictures."""
        with np.load(self.store.path(name) / PICTURE_ROWS, allow_pickle=False) as file:
            return PicturedRows(file["rows"], file["places"])

    def _survey(self, name: str, spec: DecoderSpec) -> Survey | None:
        """A finished survey; None if it had nothing to decide."""
        with self.store.reading(name) as folder:
            return read_survey(folder, spec)

    def _decided(self, key: DecoderKey) -> SurveyResult:
        assert key.survey is not None, "a survey decides"
        if key.target:
            drafter = self.drafter(key)
            sink, heads = drafter.target.manifest.sink, drafter.heads
            return SurveyResult(None, heads, self.target_text(key).tokens, 0 if sink is None else len(sink.tokens))
        survey, (first, has_sink) = self._survey(key.survey, key.spec), self.beginning(key, ())
        named = [key.tokens[0 if has_sink else 1], *key.learned]
        tokens = np.concatenate([self.tokens(name) for name in named])
        if survey is None:
            return SurveyResult(None, None, tokens)
        heads = None
        if key.kv_dtype is not None:
            limit = 32767 if key.kv_dtype == "s16" else 127
            adapted = [
                adapter_survey for name in key.adapted if (adapter_survey := self._survey(name, key.spec)) is not None
            ]
            reach = {
                at: reduce(HeadRange.covering, (adapter_survey.reach[at] for adapter_survey in adapted), seen)
                for at, seen in survey.reach.items()
            }
            with_adapters = [adapter_survey.rows for adapter_survey in adapted]
            heads = align(key.spec, reach, survey.rows, limit, has_sink=has_sink, adapted=with_adapters)
        if not has_sink:
            return SurveyResult(None, heads, tokens)
        rows = survey.rows
        if heads is not None:
            rows = {
                tensor: heads[tensor.layer, tensor.head].cached(tensor.kind, row) if tensor.result == "cache" else row
                for tensor, row in rows.items()
            }
        past = {tensor.past: row for tensor, row in rows.items()}
        return SurveyResult(FloatSink(first, survey.outlier, past, survey.logits), heads, tokens, len(first))
