"""What an export decides before it quantizes: a checkpoint and its options, brought together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import GraphRecord, RecipeRecord
from edgekv.plan import CALIBRATION_WINDOW, default_calibration_tokens
from edgekv.spec import DecoderInterface, Geometry, KvTensor, LayeredGeometry, Vocabulary
from exporters.checkpoint.aligned import AlignedHeads, align
from exporters.checkpoint.channels import outlier_channels
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.rotate import applied_rotation, shared_vocabulary
from exporters.graphs.onnx import plan_graphs
from exporters.graphs.split import Split, choose_split
from exporters.lora.sink import adapted_rows
from exporters.options import ExportOptions
from exporters.preconditions import check_fit
from exporters.progress import Progress, silent
from exporters.quantize.as_stored import resolve
from exporters.quantize.calibrate import CalibrationText, calibration_windows, read_calibration
from exporters.quantize.reference import Floats
from exporters.quantize.sink import FloatSink, first_tokens, is_sink
from exporters.quantize.survey import Survey, survey
from exporters.records import recipe_record


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What the pass of the exact decoder decides.

    Attributes:
        sink: the first tokens in float, if they become a sink.
        heads: transforms of single heads, if the recipe aligns them.
        tokens: ids of the calibration text `[windows, T]`.
    """

    sink: FloatSink | None
    heads: AlignedHeads | None
    tokens: NDArray[np.int64]

    @property
    def sink_tokens(self) -> int:
        """Number of first tokens of each window that no graph computes."""
        return 0 if self.sink is None else len(self.sink.tokens)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint and options that fit each other; see `prepare`.

    Attributes:
        checkpoint: with its attention windows limited, outlier channels split, and its vocabulary shared.
        options: with the recipe resolved for the checkpoint.
        recipe: how each matrix is quantized.
        split: the parts of every graph.
        graphs: to be written.
        calibration: the text.
        first: the tokens at the start of each of its windows, a sink if `decide` says so.
    """

    checkpoint: Checkpoint
    options: ExportOptions
    recipe: RecipeRecord
    split: Split
    graphs: Sequence[GraphRecord]
    calibration: CalibrationText
    first: tuple[int, ...]

    @property
    def survey_tokens(self) -> NDArray[np.int64]:
        """Token ids of the calibration text `[windows, T]`, each window with the tokens `first` at its start."""
        return self._tokens(self.first)

    @property
    def survey_windows(self) -> NDArray[np.int64] | None:
        """The token ids that the survey runs, `[windows, T]`; None if it decides nothing."""
        aligned = self.options.recipe.heads != "none"
        if not self.surveyed_first and not aligned:
            return None
        return self.survey_tokens if aligned else self.survey_tokens[:1]

    @property
    def surveyed_first(self) -> tuple[int, ...]:
        """The tokens that may become a sink."""
        return () if self.options.sink.mode == "none" else self.first

    def survey(self, progress: Progress = silent) -> Survey | None:
        """Run the exact decoder on the calibration text; None if nothing depends on it."""
        windows = self.survey_windows
        if windows is None:
            return None
        first, told = len(self.surveyed_first), partial(progress, "survey")
        return survey(self.checkpoint, windows, self.options.contexts[-1], first, told)

    def decide(self, found: Survey | None) -> Surveyed:
        """The sink and the transforms of heads, as far as options and recipe ask for them."""
        if found is None:
            return Surveyed(None, None, self._tokens())
        first, options, spec = self.surveyed_first, self.options, self.checkpoint.spec
        has_sink = is_sink(found.outlier, options.sink, first)
        heads = None
        if options.recipe.heads != "none":
            limit = 32767 if options.kv_dtype == "s16" else 127
            adapted = self._adapted_sinks() if has_sink and options.kv_dtype == "u8" else []
            heads = align(spec, found.reach, found.rows, limit, has_sink=has_sink, adapted=adapted)
        if not has_sink:
            return Surveyed(None, heads, self._tokens())
        rows = found.rows
        if heads is not None:
            rows = {
                each: row if each.is_state else heads[each.layer, each.head].cached(each.kind, row)
                for each, row in rows.items()
            }
        named = {tensor.past: each for tensor, each in rows.items()}
        return Surveyed(FloatSink(first, found.outlier, named, found.logits), heads, self.survey_tokens)

    def _adapted_sinks(self) -> list[dict[KvTensor, Floats]]:
        """Keys and values of the sink with each of the adapters to calibrate on."""
        choices = () if self.options.lora is None else self.options.lora.calibrate
        if not choices:
            return []
        return adapted_rows(self.checkpoint, self.surveyed_first, choices, self.options.contexts[-1])

    def _tokens(self, first: Sequence[int] | None = None) -> NDArray[np.int64]:
        """`[windows, T]`; each window begins with the tokens `first`, or with the BOS token, if there is one."""
        checkpoint, options = self.checkpoint, self.options
        tokens = options.calibration_tokens or default_calibration_tokens(checkpoint.spec.sizes)
        window = min(CALIBRATION_WINDOW, options.contexts[-1], tokens)
        return np.stack(calibration_windows(checkpoint, self.calibration.text, window, tokens, first=first))


def prepare(checkpoint: Checkpoint, options: ExportOptions) -> Prepared:
    """Bring a checkpoint and options together.

    Raises:
        UsageError: the options do not fit the checkpoint.
    """
    checkpoint = checkpoint.limited(options.max_attention_window).with_states(options.state_dtype)
    options = replace(options, recipe=resolve(options.recipe, checkpoint))
    if options.learn_tokens:
        options = replace(options, recipe=options.recipe.learned())
    vocabulary: Vocabulary = "apart"
    if options.graph_format == "onnx" and options.recipe.shares_vocabulary(checkpoint.spec):
        rotation = applied_rotation(checkpoint.spec, options.recipe.rotation)
        vocabulary = shared_vocabulary(rotation)
        options = replace(options, recipe=options.recipe.sharing_vocabulary())
    check_fit(checkpoint, options)
    channels = outlier_channels(checkpoint.spec, checkpoint.tensor) if options.recipe.splits_channels else []
    checkpoint = checkpoint.split(channels).with_vocabulary(vocabulary)
    split = _split(checkpoint, options)
    return Prepared(
        checkpoint=checkpoint,
        options=options,
        recipe=recipe_record(checkpoint.spec, options.recipe),
        split=split,
        graphs=plan_graphs(options.ar, options.contexts, split, options.graph_format, verify=options.draft_rows),
        calibration=read_calibration(options.calibration, checkpoint.folder),
        first=first_tokens(checkpoint, options.sink),
    )


def export_geometry(checkpoint: Checkpoint, options: ExportOptions) -> Geometry | LayeredGeometry:
    """The cache of the graphs for the longest context."""
    context = options.contexts[-1]
    return DecoderInterface.of(checkpoint.spec, context, options.kv_dtype, options.key_layout, "u16").cache


def _split(checkpoint: Checkpoint, options: ExportOptions) -> Split:
    spec = checkpoint.spec
    if options.graph_format == "tflite":
        return Split.whole(spec.layers)
    return choose_split(
        spec,
        options.recipe,
        splits=options.splits,
        embedding=options.embedding,
        head=options.head,
        geometry=export_geometry(checkpoint, options),
        ar=options.ar,
        graphs=(len(set(options.ar)) + len(set(options.draft_rows))) * len(options.contexts),
    )
