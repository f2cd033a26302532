"""What `edgekv export` prints of a new bundle."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from edgekv.bundle import EmbeddingQuality, Manifest, SinkRecord
from edgekv.cli.bundle_info import bytes_by_part
from edgekv.spec.tensors import expert_of, matrices
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.drafter import Drafter
from exporters.quantize.as_stored import describe_stored
from exporters.quantize.recipe import describe_recipe
from quant import FITTED

_TOKENS_PER_INPUT = 2

BROKEN_NATS = 0.2
"""Divergence from the float model that an export warns of."""
BROKEN_COSINE = 0.98
"""The same of embeddings."""


def export_lines(output: Path, manifest: Manifest, checkpoint: Checkpoint) -> Iterator[str]:
    """Size, calibration, types, graphs and the verdict of the float check, a line each."""
    yield f"{output}: {checkpoint.parameters / 1e6:.1f} M parameters, {manifest.recipe.name}, {_mb(output, manifest)}"
    if (vision := manifest.vision) is not None:
        seen = f"{vision.calibration_tiles} tiles, {vision.calibration}"
        yield f"  reads {vision.shown}; calibrated on {seen}"
    elif manifest.model.multimodal:
        yield "  the text decoder alone: encoders of images and sound are left out"
    if manifest.task is not None:
        yield f"  {manifest.task.described(manifest.model.result_width)}"
    if checkpoint.predicts_further:
        yield "  layers that predict further tokens (mtp) are left out: export them for this bundle with --draft-for"
    source = manifest.source
    text_tokens = source.calibration_tokens - source.generated_tokens
    yield f"  calibrated on {text_tokens:,} tokens of {source.calibration} text"
    if source.generated_tokens:
        yield f"  rounding learned on {source.generated_tokens:,} more tokens, written by the model itself"
    for adapter in manifest.source.adapters:
        yield f"  merged with the adapter {Path(adapter.folder).name}, scale {adapter.scale:g}"
    if manifest.source.stored is not None:
        for line in describe_stored(manifest.source.stored):
            yield f"  {line}"
    for line in describe_recipe(manifest.recipe, manifest.model.split):
        yield f"  {line}"
    if (sink := manifest.sink) is not None:
        yield f"  {_sink_line(sink, checkpoint)}"
    for graph in manifest.graphs:
        parts = f", in {len(graph.parts)} parts" if len(graph.parts) > 1 else ""
        yield f"  {graph.name}: {graph.role}, {graph.ar} tokens per inference, context {graph.context}{parts}"
    for record in manifest.quality:
        yield f"  quality, {record}"
    if manifest.task_quality is not None:
        yield f"  quality, {manifest.task_quality}"
    yield f"  {_verdict(manifest)}"


def drafter_lines(output: Path, manifest: Manifest, drafter: Drafter) -> Iterator[str]:
    """Size, what it reads of its target, calibration and the verdict of the float check, a line each."""
    layers = len(drafter.spec.own_layers)
    count = f"{layers} layers" if layers > 1 else "1 layer"
    yield f"{output}: a drafter of {count}, {manifest.recipe.name}, {_mb(output, manifest)}"
    if drafter.is_cached_apart:
        yield f"  reads the last hidden state of every token of {drafter.target.path.name}, and has a cache of its own"
    else:
        names = " and ".join(map(str, sorted({tensor.layer for tensor in drafter.read})))
        yield f"  reads the last hidden state and the keys and values of layers {names} of {drafter.target.path.name}"
    yield f"  calibrated on {manifest.source.calibration_tokens:,} tokens of {manifest.source.calibration} text"
    yield f"  {_verdict(manifest)}"
    target, folder = (shlex.quote(str(path)) for path in (drafter.target.path, output))
    yield f'next: edgekv generate {target} --draft {folder} --prompt "Once upon a time"'


def export_warnings(manifest: Manifest) -> Iterator[str]:
    """Experts that are read for nothing, a calibration text that is too short, and a KL above a usable model's."""
    if (experts := manifest.model.experts) is not None:
        read = sum(extent.bytes for name, _, extent in manifest.weights.extents() if expert_of(name) is not None)
        yield (
            f"experts: graphs for {manifest.device} compute all {experts.count} of a layer, of which a token has "
            f"{experts.used}: a decode step reads {read / 1e6:,.1f} MB of experts, and needs "
            f"{read / 1e6 * experts.used / experts.count:,.1f} MB. Engines on a CPU read what they need, and so do "
            "decode graphs of edgekv compile --experts operands"
        )
    if unreached := manifest.source.unreached_experts:
        layers: dict[str, list[str]] = {}
        for layer, expert in (name.split(".") for name in unreached):
            layers.setdefault(layer, []).append(expert)
        named = "; ".join(f"layer {layer}: {', '.join(experts)}" for layer, experts in layers.items())
        yield (
            f"calibration: got no token that chooses {len(unreached)} experts ({named}); expected some for each: they "
            f"are quantized by their weights alone. Give a longer --calibration"
        )
    if (fitted := [weight.tensor for weight in manifest.recipe.weights if weight.method in FITTED]) != []:
        shapes = matrices(manifest.model)
        widest = max(fitted, key=lambda name: shapes[name][1])
        expected, tokens = _TOKENS_PER_INPUT * shapes[widest][1], manifest.source.calibration_tokens
        if tokens < expected:
            yield (
                f"calibration: got {tokens:,} tokens; expected at least {expected:,}, {_TOKENS_PER_INPUT} for each "
                f"input of {widest}: its integers fit this text, and other text worse. Give a longer --calibration"
            )
    if (most := manifest.model.shorter_texts(manifest.context)) is not None:
        measured = "".join(f" ({record})" for record in manifest.quality if record.text == "short")
        yield (
            f"--context {manifest.context} is above original_max_position_embeddings = {most}: every text is rotated "
            f"by long_factor, and transformers rotates texts of up to {most} tokens by short_factor{measured}. "
            f"Export for short texts with --context {most}"
        )
    lost = manifest.task_quality
    if isinstance(lost, EmbeddingQuality) and lost.cosine < BROKEN_COSINE:
        yield (
            f"quality: cosine {lost.cosine:.3f} with the float model's embeddings, below {BROKEN_COSINE}: "
            f"a wrong --sink, --calibration of another kind, or too few bits (--recipe w8a16)"
        )
    for record in manifest.quality:
        if record.kl_nats > BROKEN_NATS and record.text != "short":
            yield (
                f"quality: KL divergence {record.kl_nats:.2g} nats a token on {record.text}, above {BROKEN_NATS}: "
                f"a wrong --sink, --calibration of another kind, or too few bits (--recipe w8a16)"
            )


def _mb(output: Path, manifest: Manifest) -> str:
    """The size of a bundle, as `edgekv info` says it."""
    return f"{sum(bytes_by_part(output, manifest).values()) / 1e6:.2f} MB"


def _verdict(manifest: Manifest) -> str:
    return {
        "integers-only": f"every graph compiles for {manifest.device}, integers only",
        "float-allowed": f"compiles for {manifest.device}; {len(manifest.floating_nodes)} nodes compute in float",
        "not-run": "not checked on the HTP compiler",
    }[manifest.htp_check]


def _sink_line(sink: SinkRecord, checkpoint: Checkpoint) -> str:
    names = " ".join(repr(checkpoint.tokenizer.id_to_token(token)) for token in sink.tokens)
    return f"sink {names}: restored, not computed; {sink.ratio:.0f} times all other tokens in {sink.result}"
