"""The manifest's records of a checkpoint and a recipe."""

from __future__ import annotations

from pathlib import Path

from edgekv.bundle import (
    AdapterRecord,
    RecipeRecord,
    SinkRecord,
    TokenRecord,
    WeightRecord,
)
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.tensors import matrices
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.neurons import applied_scaling
from exporters.checkpoint.rotate import applied_rotation
from exporters.quantize.recipe import Recipe
from exporters.quantize.sink import SINK_FILE, FloatSink


def recipe_record(spec: DecoderSpec, recipe: Recipe) -> RecipeRecord:
    """The recipe as it applies to a decoder.

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
        neuron_scaling=applied_scaling(spec, recipe.neuron_scaling),
        outlier_channels=recipe.outlier_channels,
        heads=recipe.heads,
    )


def sink_record(sink: FloatSink) -> SinkRecord:
    """The sink."""
    outlier = sink.outlier
    return SinkRecord(tokens=list(sink.tokens), file=SINK_FILE, result=outlier.result, ratio=outlier.ratio)


def source_name(checkpoint: Checkpoint) -> str:
    """How a manifest names a checkpoint: its path, or its hub id or URL."""
    return str(checkpoint.folder.resolve()) if Path(checkpoint.name).exists() else checkpoint.name


def adapter_records(checkpoint: Checkpoint) -> list[AdapterRecord]:
    """The adapters that are merged into a checkpoint."""
    return [
        AdapterRecord(folder=str(each.folder.resolve()), sha256=each.sha256, scale=each.scale)
        for each in checkpoint.adapters
    ]


def token_record(checkpoint: Checkpoint) -> TokenRecord:
    """The special tokens."""
    special = checkpoint.special
    return TokenRecord(bos=special.bos, eos=list(special.eos), pad=special.pad)
