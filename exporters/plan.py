"""What is wanted of an export: a checkpoint and its options, brought together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import GraphRecord, RecipeRecord
from edgekv.embed import pair_tokens
from edgekv.errors import UsageError
from edgekv.plan import DEFAULT_AR, EncoderPlan, calibration_window
from edgekv.spec import DecoderInterface, DecoderSpec, EmbeddingTask, EncoderSpec, Geometry, Vocabulary
from exporters.checkpoint.channels import outlier_channels
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.rotate import applied_rotation, shared_vocabulary
from exporters.graphs.onnx import plan_graphs
from exporters.graphs.split import Split, choose_split
from exporters.options import ExportOptions
from exporters.preconditions import check_cache, check_encoder_fits, check_fit
from exporters.quantize.as_stored import resolve
from exporters.quantize.calibrate import (
    CHAT_SHARE,
    CalibrationText,
    as_chats,
    calibration_windows,
    chat_opening,
    check_states_are_read,
    read_calibration,
    rendered,
)
from exporters.quantize.generated import text_tokens
from exporters.quantize.pictures import CalibrationPictures, calibration_pictures, with_pictures
from exporters.quantize.sink import sink_candidates

_SURVEYED_WINDOWS = 3  # one of so many shows how far keys and values reach
_CHARACTERS_PER_TOKEN = 8  # more than any tokenizer has on average


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A checkpoint and options that fit each other.

    Attributes:
        checkpoint: with its attention windows limited, outlier channels split, and its vocabulary shared.
        options: with the recipe resolved for the checkpoint.
        recipe: how each matrix is quantized.
        split: the parts of every graph.
        graphs: to be written.
        calibration: the text.
        first: the tokens at the start of each of its windows, a sink if the survey says so.
        survey_tokens: token ids of the text `[windows, T]`, each window with the tokens `first` at its start.
        pictures: that a vision encoder is calibrated on; None without an encoder.
        plain_tokens: likewise for first tokens that are no sink: each window begins with BOS, if there is one.
    """

    checkpoint: Checkpoint
    options: ExportOptions
    recipe: RecipeRecord
    split: Split
    graphs: Sequence[GraphRecord]
    calibration: CalibrationText
    first: tuple[int, ...]
    survey_tokens: NDArray[np.int64]
    plain_tokens: NDArray[np.int64]
    pictures: CalibrationPictures | None = None

    @property
    def encoder(self) -> EncoderSpec | None:
        """The vision encoder with the matrices that the recipe keeps at 16 bits; None if there is none."""
        vision = self.checkpoint.vision
        if vision is None:
            return None
        wide = self.options.recipe.wide_matrices(vision.spec)
        return msgspec.structs.replace(vision.spec, wide=wide)

    @property
    def encoder_plan(self) -> EncoderPlan | None:
        """What the vision encoder costs; None if there is none."""
        spec, shown = self.encoder, self.pictures
        fits = self.options.effort.encoder_method != "nearest"
        return None if spec is None or shown is None else EncoderPlan.of(spec, len(shown.tiles), fits=fits)

    @property
    def survey_windows(self) -> NDArray[np.int64] | None:
        """The token ids that the survey runs, `[windows, T]`; None if it decides nothing."""
        aligned = self.options.recipe.heads != "none"
        if not self.surveyed_first and not aligned:
            return None
        return self.survey_tokens[::_SURVEYED_WINDOWS] if aligned else self.survey_tokens[:1]

    @property
    def surveyed_first(self) -> tuple[int, ...]:
        """The tokens that may become a sink."""
        return () if self.options.sink.mode == "none" else self.first

    @property
    def learned_windows(self) -> int:
        """Number of windows of text that the model writes itself."""
        if self.checkpoint.task is not None:  # its head writes none
            return 0
        return self.options.effort.written_windows(self.survey_tokens.shape[1])

    def chat_opening(self) -> tuple[int, ...]:
        """The tokens in front of a user's first message; none without a template, or where they fill half a window."""
        return opening_tokens(self.checkpoint, self.survey_tokens.shape[1])

    def chat_special(self) -> tuple[int, ...]:
        """The ids in conversations of the calibration text that stand for no text."""
        has_bos = int(self.checkpoint.special.bos is not None)
        return special_tokens(self.checkpoint, self.plain_tokens[:, has_bos:])


def opening_tokens(checkpoint: Checkpoint, window: int) -> tuple[int, ...]:
    """The tokens in front of a user's first message; none without a template, or where they fill half a window."""
    opening = () if checkpoint.chat is None else tuple(checkpoint.encode(chat_opening(checkpoint.chat)))
    return opening if 2 * len(opening) < window else ()


def special_tokens(checkpoint: Checkpoint, ids: NDArray[np.int64] | Sequence[int]) -> tuple[int, ...]:
    """The ids among these that stand for no text."""
    special = np.setdiff1d(ids, text_tokens(checkpoint.tokenizer, checkpoint.spec.vocab))
    return tuple(special[special < checkpoint.spec.vocab].tolist())


def plan_export(checkpoint: Checkpoint, options: ExportOptions) -> ExportPlan:
    """Bring a checkpoint and options together.

    Raises:
        UsageError: the options do not fit the checkpoint.
    """
    spec = msgspec.structs.replace(
        checkpoint.spec.with_states(options.state_dtype),
        limits=tuple(options.max_attention_window),
        gives_hidden=options.give_hidden,
    )
    checkpoint = checkpoint.as_spec(spec)
    options = options.for_checkpoint(is_quantized=checkpoint.quantization is not None)
    options = replace(options, recipe=resolve(options.recipe, checkpoint))
    recipe = options.recipe.for_decoder(checkpoint.spec.sizes).with_effort(options.effort, checkpoint.spec)
    options = replace(options, recipe=recipe)
    pictures = None
    if (vision := checkpoint.vision) is not None:
        checkpoint = replace(checkpoint, vision=(vision := vision.with_sizes(options.picture_sizes)))
        options = _for_pictures(options, vision.spec.rows if spec.whole_pictures else 1)
        options.recipe.wide_matrices(vision.spec)
        pictures = calibration_pictures(options.calibration_pictures, vision.pictures, vision.spec.image)
    elif options.picture_sizes:
        expected = "a checkpoint with a vision encoder"
        raise UsageError("--picture-sizes", got="it", expected=expected, fix="Leave it out.")
    elif options.recipe.encoder_16bit:
        got, fix = "encoder_16bit", "Leave it out of the recipe."
        raise UsageError(
            f"--recipe {options.recipe.name}", got=got, expected="a checkpoint with a vision encoder", fix=fix
        )
    elif options.calibration_pictures is not None:
        fix = "Leave it out."
        raise UsageError("--calibration-pictures", got="it", expected="a checkpoint with a vision encoder", fix=fix)
    vocabulary: Vocabulary = "apart"
    if options.graph_format == "onnx" and options.recipe.shares_vocabulary(checkpoint.spec):
        rotation = applied_rotation(checkpoint.spec, options.recipe.rotation)
        vocabulary = shared_vocabulary(rotation)
        options = replace(options, recipe=options.recipe.sharing_vocabulary(vocabulary))
    check_fit(checkpoint, options)
    if checkpoint.spec.bidirectional:
        options = replace(options, ar=(1,))  # its graphs have the ARs of their contexts
    channels = outlier_channels(checkpoint.spec, checkpoint.tensor) if options.recipe.splits_channels else []
    checkpoint = checkpoint.as_spec(msgspec.structs.replace(spec, split=tuple(channels), vocabulary=vocabulary))
    split = _split(checkpoint, options)
    calibration = read_calibration(options.calibration, checkpoint.folder)
    first, bos = sink_candidates(checkpoint, options.sink), checkpoint.special.bos
    tokens = options.calibration_tokens or options.effort.calibration_tokens(checkpoint.spec.sizes)
    length = calibration_window(options.contexts[-1], has_delta_rule=checkpoint.spec.delta_rule is not None)
    windows = _Windows.of(checkpoint, calibration, min(length, tokens), tokens)

    def beginning(first: Sequence[int]) -> NDArray[np.int64]:
        ids, vision = windows.beginning(first), checkpoint.vision
        check_states_are_read(checkpoint.spec, ids.shape[1])
        if vision is None or pictures is None:
            return ids
        rows = [vision.spec.rows_of(tile.shape[1], tile.shape[0]) for tile in pictures.tiles]
        return with_pictures(ids, checkpoint.spec.vocab, rows)

    return ExportPlan(
        checkpoint=checkpoint,
        options=options,
        recipe=options.recipe.record(checkpoint.spec),
        split=split,
        graphs=plan_graphs(
            options.ar,
            options.contexts,
            split,
            options.graph_format,
            verify=_verify_rows(checkpoint, options),
            is_cached=not checkpoint.spec.bidirectional,
        ),
        calibration=calibration,
        first=first,
        survey_tokens=beginning(first),
        plain_tokens=beginning(() if bos is None else (bos,)),
        pictures=pictures,
    )


@dataclass(frozen=True, slots=True)
class _Windows:
    """A calibration text as tokens: prose, and a fifth of it as chats if the checkpoint has a template.

    Attributes:
        ids: of the text.
        chat: of conversations in the template; empty if there is none.
        length: T of a window.
        tokens: limit of both together.
    """

    ids: Sequence[int]
    chat: Sequence[int]
    length: int
    tokens: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, calibration: CalibrationText, length: int, tokens: int) -> _Windows:
        """Encode a text: chats are those beside it, or made of what is left of it."""
        text, chats = calibration.text, calibration.chats
        ids, chat = _encoded(checkpoint, text), list[int]()
        share = tokens // CHAT_SHARE // length * length
        if checkpoint.chat is not None and checkpoint.task is None and share:
            if not chats:
                used = len(text) * (tokens - share) // len(ids)
                chats = as_chats(text[used:] if len(ids) >= tokens else text, _CHARACTERS_PER_TOKEN * share)
            chat = checkpoint.encode(rendered(checkpoint.chat, chats))
        return cls(ids, chat if len(chat) >= length else (), length, tokens)

    def beginning(self, first: Sequence[int]) -> NDArray[np.int64]:
        """Windows `[windows, T]`, each with the tokens `first` at its start.

        Raises:
            UsageError: the text is too short, or a window has no room behind `first`.
        """
        share = self.tokens // CHAT_SHARE // self.length * self.length if self.chat else 0
        windows = [calibration_windows(self.ids, self.length, self.tokens - share, first)]
        if share:
            chats = calibration_windows(self.chat, self.length, share, first)
            windows += [chats] if chats.shape[1] == windows[0].shape[1] else []
        return np.concatenate(windows)


def _verify_rows(checkpoint: Checkpoint, options: ExportOptions) -> tuple[int, ...]:
    """AR of the verify graphs; without text to write, of that whose rows are means, or of several texts in a pass."""
    task = checkpoint.task
    if task is None:
        return options.verify_rows
    is_mean = isinstance(task, EmbeddingTask) and task.pooling == "mean"
    return tuple(ar for ar in {max(options.ar)} if ar > 1 and (is_mean or checkpoint.spec.delta_rule is None))


def _encoded(checkpoint: Checkpoint, text: str) -> list[int]:
    """The tokens of a text; for a model that reads single texts, its paragraphs as these, one after another."""
    if checkpoint.task is None:
        return checkpoint.encode(text)
    paragraphs = [*filter(None, map(str.strip, text.split("\n\n")))]
    if isinstance(task := checkpoint.task, EmbeddingTask):
        return [token for paragraph in paragraphs for token in checkpoint.encode(paragraph, around=True)]
    pairs, tokens = zip(paragraphs, paragraphs[1:] or paragraphs, strict=False), list[int]()
    for first, second in pairs:
        query = first.partition(". ")[0]
        tokens += pair_tokens(checkpoint.tokenizer, task, query, second, vocab=checkpoint.spec.vocab)[0]
    return tokens


def _for_pictures(options: ExportOptions, rows: int) -> ExportOptions:
    """With embeddings on the host, which puts the rows of pictures among them.

    Args:
        options: of the export.
        rows: that a step has at least.

    Raises:
        UsageError: the options say otherwise.
    """
    check_encoder_fits(options.device)
    got = ""
    if options.embedding == "graph":
        got = "--embedding graph"
    elif options.lora is not None:
        got = "slots for adapters"
    if got:
        expected = "embeddings on the host, in graphs without slots"
        raise UsageError("a checkpoint with a vision encoder", got=got, expected=expected, fix="Leave it out.")
    if max(options.ar) < rows:
        if tuple(options.ar) != DEFAULT_AR:
            expected = f"one of {rows} or more: the rows of a picture attend to each other, so a step has all of them"
            got, fix = ",".join(map(str, options.ar)), f"Use --ar 1,{rows}."
            raise UsageError("--ar", got=got, expected=expected, fix=fix)
        options = replace(options, ar=(*DEFAULT_AR, rows))
    return replace(options, embedding="host")


def export_geometry(spec: DecoderSpec, options: ExportOptions) -> Geometry:
    """The cache of the graphs for the longest context.

    Raises:
        UsageError: naming an option with which there is none.
    """
    check_cache(spec, options)
    context = options.contexts[-1]
    return DecoderInterface.of(spec, context, options.cache_dtype, options.cache_layout, "u16").cache


def _split(checkpoint: Checkpoint, options: ExportOptions) -> Split:
    spec = checkpoint.spec
    if options.graph_format == "tflite":
        return Split.whole(spec.layers, embeds=options.embedding != "host")
    return choose_split(
        spec,
        options.recipe,
        splits=options.splits,
        embedding=options.embedding,
        head=options.head,
        geometry=export_geometry(checkpoint.spec, options),
        ar=options.ar,
        graphs=(len(set(options.ar)) + len(set(options.verify_rows))) * len(options.contexts),
    )
