"""What pieces read: the checkpoint, proven by its hashes, and the files of finished pieces."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import RecipeRecord
from edgekv.errors import CheckpointError, UsageError
from edgekv.kv import KvDtype
from edgekv.spec import DecoderSpec, Vocabulary
from exporters.checkpoint.aligned import align
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import transformed
from exporters.checkpoint.head_range import HeadRange
from exporters.checkpoint.lora import Adapter, AdapterChoice
from exporters.checkpoint.tensors import Tensors
from exporters.checkpoint.vision import VisionEncoder
from exporters.contents import Surveyed
from exporters.lora.base import ExportedBase
from exporters.lora.quantize import folded_factors
from exporters.pipeline.hashed import hashed
from exporters.pipeline.layer_file import LayerFile
from exporters.pipeline.place import Identity, Place
from exporters.pipeline.store import PieceStore
from exporters.pipeline.survey_file import read_survey
from exporters.progress import Progress, silent
from exporters.quantize.matrices import Quantizer
from exporters.quantize.recipe import Recipe
from exporters.quantize.reference import Changes
from exporters.quantize.sink import FloatSink, is_sink
from exporters.quantize.sink_wanted import SinkWanted
from exporters.quantize.survey import Survey

BUNDLE = "bundle"
LAYER = "layer"
TEXT = "text.txt"
TOKENS = "tokens.npy"
PICTURE_ROWS = "rows.npy"
_MOST_KEPT = 4  # decoders of a process


@dataclass(frozen=True, slots=True)
class Exact:
    """The exact decoder.

    Attributes:
        weights: see `Identity`.
        config: see `Identity`.
        spec: the decoder, with all that options changed in it.
        context: of the rotary embedding.
        pictures: name of the encoder whose float rows of drawn pictures follow the table of embeddings; None for none.
    """

    weights: str
    config: str
    spec: DecoderSpec
    context: int
    pictures: str | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the pieces that it follows from."""
        return () if self.pictures is None else (self.pictures,)

    @property
    def of_text(self) -> Exact:
        """Without pictures."""
        return replace(self, pictures=None)

    @property
    def alone(self) -> Exact:
        """With a vocabulary that no recipe chose: the same logits to the bit, so all recipes share pieces."""
        return self.with_vocabulary("apart")

    def with_vocabulary(self, vocabulary: Vocabulary) -> Exact:
        """See `Checkpoint.with_vocabulary`."""
        return replace(self, spec=msgspec.structs.replace(self.spec, vocabulary=vocabulary))

    def of(self, checkpoint: Checkpoint) -> Checkpoint:
        """The decoder of a checkpoint.

        Raises:
            ValueError: an option changes the decoder in a way that is not made here.
        """
        spec = self.spec
        if spec.convolution_states is not None:
            checkpoint = checkpoint.with_states(spec.convolution_states.dtype)
        if spec.gives_hidden:
            checkpoint = checkpoint.giving_hidden()
        decoder = checkpoint.limited(spec.limits).split(spec.split).with_vocabulary(spec.vocabulary)
        if decoder.spec != spec:
            raise ValueError(f"decoder: got {decoder.spec}; expected {spec}")
        return decoder


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
        if (found := Adapter.open(self.choice).sha256) != self.sha256:
            raise CheckpointError(
                f"adapter {self.choice.folder}",
                got=f"another one, sha256 {found}",
                expected=f"{self.sha256}, as the command has",
                fix="Give all workers the same files.",
            )
        return self.choice


@dataclass(frozen=True, slots=True)
class SinkChoice:
    """What decides whether the first tokens become a sink.

    Attributes:
        survey: name of the survey.
        wanted: the option.
        first: the tokens that may become one.
    """

    survey: str
    wanted: SinkWanted
    first: tuple[int, ...]

    def chooses(self, found: Survey | None) -> bool:
        """Whether they do."""
        return found is not None and is_sink(found.outlier, self.wanted, self.first)


@dataclass(frozen=True, slots=True)
class Folded:
    """The exact decoder with all that a recipe folds into its weights, and its calibration text.

    Attributes:
        exact: the decoder.
        sink: of all texts.
        transforms: the recipe's, without its rules.
        kv_dtype: integer type of the cache that heads are aligned for; None if they are not.
        adapted: names of surveys with adapters, for which the heads are aligned too.
        tokens: names of the calibration tokens: with the sink at the start of each window, and without.
        learned: names of the text that the model writes itself.
    """

    exact: Exact
    sink: SinkChoice
    transforms: RecipeRecord
    kv_dtype: KvDtype | None
    adapted: tuple[str, ...]
    tokens: tuple[str, str]
    learned: tuple[str, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the pieces that it follows from."""
        return (self.sink.survey, *self.adapted, *self.tokens, *self.learned, *self.exact.needs)


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
    ) -> None:
        self.store = store
        self.progress = progress
        self.threads = threads
        self._place = place
        self._keeps_files = keeps_files
        self._keeps_residual = keeps_residual
        self._layers: dict[str, LayerFile] = {}
        self._quantizer: tuple[str, Quantizer] | None = None
        self._exact: dict[str, tuple[Checkpoint, Checkpoint]] = {}
        self._surveyed: dict[str, Surveyed] = {}
        self._folded: tuple[str, Tensors, Tensors] | None = None
        self._bundles: dict[str, Path] = {}

    def exact(self, exact: Exact) -> Tensors:
        """The weights of the exact decoder, and nothing else of its checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be read, or is another one here.
        """
        return self._decoder(exact, weights=exact.weights, config=exact.config)

    def encoder(self, exact: Exact) -> VisionEncoder:
        """The vision encoder of the checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be read, is another one here, or has none.
        """
        found = self._decoder(exact, weights=exact.weights, config=exact.config).vision
        if found is None:
            raise CheckpointError("vision encoder", got="none", expected="one", fix="Give all workers the same files.")
        return found

    def checkpoint(self, exact: Exact, identity: Identity) -> Checkpoint:
        """All of the checkpoint.

        Raises:
            CheckpointError: it cannot be read, or is another one here.
        """
        return self._decoder(exact, **{name: getattr(identity, name) for name in Identity.__slots__})

    def take(self, exact: Exact, checkpoint: Checkpoint, decoder: Checkpoint) -> None:
        """Take the decoder of a checkpoint that is open here already."""
        self._exact[hashed(exact.of_text)] = checkpoint, decoder

    def check_values(self, exact: Exact) -> None:
        """See `Checkpoint.check_values`."""
        checkpoint = self._decoder(exact, weights=exact.weights, config=exact.config)
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

    def text_checkpoint(self, exact: Exact, tokenizer: str) -> Checkpoint:
        """The checkpoint without its chat templates and sampling defaults, for pieces that encode text.

        Args:
            exact: the decoder.
            tokenizer: see `Identity`.
        """
        found = self._decoder(exact, weights=exact.weights, config=exact.config, tokenizer=tokenizer)
        return replace(found, chat=None, generation=None)

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
                found: NDArray[np.int64] = np.load(folder / TOKENS, allow_pickle=False)
                if found.dtype == np.int64 and found.ndim == 2:
                    return found
                reason = f"{found.dtype} {found.shape}"
            except (OSError, ValueError, EOFError) as error:
                reason = str(error)
            fix = f"Remove the piece from {self.store.place}, and run the same command again."
            raise UsageError(f"piece {name}", got=reason, expected="token ids [windows, T]", fix=fix)

    def surveyed(self, folded: Folded) -> Surveyed:
        """What the survey decides."""
        key = hashed(folded)
        if key not in self._surveyed:
            if len(self._surveyed) > _MOST_KEPT:
                self._surveyed.clear()
            self._surveyed[key] = self._decided(folded)
        return self._surveyed[key]

    def survey(self, name: str, exact: Exact) -> Survey | None:
        """A finished survey; None if it had nothing to decide."""
        spec = self.exact(exact).spec
        with self.store.reading(name) as folder:
            return read_survey(folder, spec)

    def folded(self, folded: Folded) -> Tensors:
        """The weights with all that the recipe folds into them; the last ones are kept."""
        exact, key = self.exact(folded.exact), hashed(folded)
        if self._folded is None or self._folded[0] != key or self._folded[1] is not exact:
            self._folded = key, exact, transformed(exact, folded.transforms, self.surveyed(folded).heads)
        return self._folded[2]

    def changes(self, adapter: ProvenAdapter, exact: Exact, tensors: Tensors | None = None) -> Changes:
        """What an adapter adds to the exact decoder.

        Args:
            adapter: the adapter.
            exact: the decoder.
            tensors: its weights with what a recipe folds into them; None: without.

        Raises:
            CheckpointError: the adapter is another one here, damaged, or of another model.
        """
        checkpoint = self._decoder(exact, weights=exact.weights, config=exact.config)
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

    def take_quantizer(
        self, folded: Folded, rules: Recipe, before: str | None = None, *, follows: bool = True
    ) -> Quantizer:
        """A quantizer that has run the decoder up to a layer.

        Args:
            folded: the decoder.
            rules: of the matrices that come next.
            before: name of the layer; None for the embeddings.
            follows: see `Quantizer`.
        """
        kept, self._quantizer = self._quantizer, None
        if kept is not None and kept[0] == before:
            kept[1].recipe = rules
            return kept[1]
        del kept  # its memory is for the next one
        surveyed, context = self.surveyed(folded), folded.exact.context
        quantizer = Quantizer(
            self.folded(folded),
            surveyed.tokens,
            context,
            rules,
            surveyed.sink_tokens,
            follows=follows,
            folder=self.store.folder,
        )
        if before is not None:
            layer = self.layer(before)
            layer.check_residual(quantizer.hidden.shape)
            quantizer.hidden = layer.hidden()
            quantizer.take_ranges()  # that of the embedding belongs to the first layer
        return quantizer

    def keep(self, name: str, folder: Path, quantizer: Quantizer | None) -> None:
        """Keep a layer's file open, and the quantizer that made it, for the pieces that follow in this process."""
        if self._keeps_residual and quantizer is not None:
            self._quantizer = name, quantizer
        if self._keeps_files and os.name != "nt":  # Windows renames no folder with an open file
            self._layers[name] = LayerFile.open(folder / LAYER)

    def release(self) -> None:
        """Free the memory of the last layer."""
        self._quantizer = None

    def _decoder(self, exact: Exact, **wanted: str) -> Checkpoint:
        assert self._place is not None, "pieces that read a checkpoint have a place"
        checkpoint = self._place.proven(**wanted)
        key = hashed(exact)
        known = self._exact.get(key)
        if known is None or known[0] is not checkpoint:
            if len(self._exact) > _MOST_KEPT:
                self._exact.clear()
            if exact.pictures is None:
                decoder = exact.of(checkpoint)
            else:
                decoder = self._decoder(exact.of_text, **wanted).with_pictures(self._picture_rows(exact.pictures))
            known = self._exact[key] = checkpoint, decoder
        return known[1]

    def _picture_rows(self, name: str) -> NDArray[np.float32]:
        """The float rows `[rows, hidden]` that an encoder has found for drawn pictures."""
        found: NDArray[np.float32] = np.load(self.store.path(name) / PICTURE_ROWS, allow_pickle=False)
        return found

    def _decided(self, folded: Folded) -> Surveyed:
        found, exact = self.survey(folded.sink.survey, folded.exact), folded.exact
        checkpoint = self._decoder(exact, weights=exact.weights, config=exact.config)
        first, has_sink = folded.sink.first, folded.sink.chooses(found)
        named = [folded.tokens[0 if has_sink else 1], *folded.learned]
        tokens = np.concatenate([self.tokens(name) for name in named])
        if found is None:
            return Surveyed(None, None, tokens)
        heads = None
        if folded.kv_dtype is not None:
            limit = 32767 if folded.kv_dtype == "s16" else 127
            adapted = [each for name in folded.adapted if (each := self.survey(name, exact)) is not None]
            reach = {
                at: reduce(HeadRange.covering, (each.reach[at] for each in adapted), seen)
                for at, seen in found.reach.items()
            }
            with_adapters = [each.rows for each in adapted]
            heads = align(checkpoint.spec, reach, found.rows, limit, has_sink=has_sink, adapted=with_adapters)
        if not has_sink:
            return Surveyed(None, heads, tokens)
        rows = found.rows
        if heads is not None:
            rows = {
                each: heads[each.layer, each.head].cached(each.kind, row) if each.result == "cache" else row
                for each, row in rows.items()
            }
        past = {tensor.past: each for tensor, each in rows.items()}
        return Surveyed(FloatSink(first, found.outlier, past, found.logits), heads, tokens)
