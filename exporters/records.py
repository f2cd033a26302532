"""The manifest's records of a checkpoint and a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgekv.bundle import (
    AdapterRecord,
    ChannelRecord,
    ModelRecord,
    RecipeRecord,
    RopeRecord,
    SinkRecord,
    SourceRecord,
    StoredRecord,
    TokenRecord,
    WeightRecord,
)
from edgekv.spec.decoder import DecoderSpec, SplitChannel
from edgekv.spec.rope import Rope
from edgekv.spec.tensors import matrices
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.rotate import applied_rotation
from exporters.quantize.recipe import Recipe
from exporters.quantize.sink import SINK_FILE, FloatSink


def recipe_record(spec: DecoderSpec, recipe: Recipe, channels: Sequence[SplitChannel] = ()) -> RecipeRecord:
    """The recipe as it applies to a decoder, with these channels of the residual split.

    Raises:
        UsageError: no rule matches a matrix.
    """
    rules = ((name, recipe.rule(name)) for name in matrices(spec))
    weights = [WeightRecord(tensor=name, dtype=rule.dtype, method=rule.method) for name, rule in rules]
    return RecipeRecord(
        name=recipe.name,
        rotation=applied_rotation(spec, recipe.rotation),
        weights=weights,
        value_rotation=recipe.value_rotation,
        key_scaling=recipe.key_scaling,
        neuron_scaling=recipe.neuron_scaling,
        outlier_channels=recipe.outlier_channels,
        split_channels=[ChannelRecord(channel=each.channel, parts=each.parts) for each in channels],
        heads=recipe.heads,
    )


def model_record(checkpoint: Checkpoint) -> ModelRecord:
    """The sizes of the decoder."""
    spec = checkpoint.spec
    return ModelRecord(
        model_type=spec.model_type,
        layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate=spec.intermediate,
        vocab=spec.vocab,
        max_positions=spec.max_positions,
    )


def rope_record(rope: Rope, context: int) -> RopeRecord:
    """A rotary embedding, resolved for a context of this many tokens."""
    rotation = rope.rotation(context)
    return RopeRecord(
        rope_type=rope.rope_type,
        theta=rope.theta,
        parameters={name: list(v) if isinstance(v, tuple) else v for name, v in rope.parameters.items()},
        inverse_frequencies=rotation.inverse_frequencies.tolist(),
        attention_factor=rotation.attention_factor,
    )


def sink_record(sink: FloatSink) -> SinkRecord:
    """The sink."""
    outlier = sink.outlier
    return SinkRecord(tokens=list(sink.tokens), file=SINK_FILE, result=outlier.result, ratio=outlier.ratio)


def source_record(
    checkpoint: Checkpoint,
    weights_sha256: str,
    calibration: str,
    tokens: int,
    stored: StoredRecord | None,
    generated_tokens: int = 0,
) -> SourceRecord:
    """The checkpoint, its adapters, and the text that it was calibrated on."""
    return SourceRecord(
        checkpoint=str(checkpoint.folder.resolve()) if Path(checkpoint.name).exists() else checkpoint.name,
        weights_sha256=weights_sha256,
        calibration=calibration,
        calibration_tokens=tokens,
        stored=stored,
        adapters=[
            AdapterRecord(folder=str(each.folder.resolve()), sha256=each.sha256, scale=each.scale)
            for each in checkpoint.adapters
        ],
        generated_tokens=generated_tokens,
    )


def token_record(checkpoint: Checkpoint) -> TokenRecord:
    """The special tokens."""
    special = checkpoint.special
    return TokenRecord(bos=special.bos, eos=list(special.eos), pad=special.pad)
