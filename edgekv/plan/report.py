"""Everything that `edgekv plan` says, as one typed object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from devices import Device
from edgekv.errors import CheckpointError, UsageError
from edgekv.kv import Geometry, KvDtype
from edgekv.plan.activations import activation_bytes
from edgekv.plan.cache import (
    CHOICES,
    HTP_CONTEXT_BYTES,
    WEIGHT_DTYPES,
    Choice,
    Decoder,
    Overrides,
    Recommendation,
    Subject,
    Weights,
    find_subject,
    is_bundle,
    largest_multiple,
    make_report,
    recipe_weights,
)
from edgekv.plan.cost import ExportCost, export_cost, layer_graph_bytes
from edgekv.plan.parts import PROTOBUF_BYTES, Load, Part, lay_out, least_splits
from edgekv.plan.roofline import Roofline, roofline
from edgekv.plan.verdict import Demand, PlanVerdict, make_plan_verdict

RECIPES = tuple(WEIGHT_DTYPES)
_KV_BITS = {"u8": 8, "s16": 16}
_OWN_ASSUMPTIONS = (
    "one HTP context of 3.75 GB, a limit met in the field; compiled binaries, 1 to 3 % above their weights where "
    "they were measured, are counted as their weights",
    "activations counted as if a layer freed nothing; the HTP compiler's own schedule is not known",
    "the phone's RAM is not in the catalogue and was not checked",
    "roofline: peak DRAM bandwidth, nothing but weights and cache read; measured decoders reach a part of it",
    "export: fitted to four models of up to 384 M parameters on two shared x86 cores; times may be off by a factor "
    "of two, more beyond those sizes; `edgekv compile` comes on top",
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What an export of a model for a device would be.

    Attributes:
        verdict: whether it fits.
        source: the file that the sizes are from.
        device: part number.
        recipe: integer types of weights and activations.
        kv_dtype: integer type of the cache.
        context: S, tokens.
        ar: tokens per inference of each graph.
        parameters: elements of all matrices, the table counted once as the embedding and once as the head.
        strategy: the update strategy that is planned with, and why.
        demand: bytes in one context.
        parts: what export divides the graphs into, or None if a single layer is too large for a context.
        export: what exporting it takes.
        roofline: how fast it can be at best.
        assumptions: what all this rests on.
    """

    verdict: PlanVerdict
    source: str
    device: str
    recipe: str
    kv_dtype: KvDtype
    context: int
    ar: list[int]
    parameters: int
    strategy: Recommendation
    demand: Demand
    parts: list[Part] | None
    export: ExportCost
    roofline: Roofline
    assumptions: list[str]


def make_plan(
    path: Path,
    *,
    device: Device,
    context: int | None = None,
    recipe: str = "w8a16",
    kv: str = "u8",
    ar: tuple[int, ...] | None = None,
) -> Plan:
    """Plan the export of a model for a device.

    Args:
        path: a `config.json`, or a folder that has one; no weights are read.
        device: the target.
        context: S; the model's own longest if None.
        recipe: one of `RECIPES`.
        kv: `u8` or `s16`.
        ar: tokens per inference of each graph; 1 and 32 if None.

    Raises:
        UsageError: options that export would refuse for this model and device.
        CheckpointError: a `config.json` that cannot be read, or a model whose weights are not known.
    """
    if recipe not in RECIPES:
        raise UsageError("--recipe", got=repr(recipe), expected=" or ".join(RECIPES), fix="Use --recipe w8a16.")
    if kv not in _KV_BITS:
        raise UsageError("--kv", got=repr(kv), expected=" or ".join(_KV_BITS), fix="Use --kv u8.")
    if is_bundle(path):
        fix = "It is exported already: `edgekv size` says what it costs."
        raise CheckpointError(str(path), got="a bundle", expected="a checkpoint's config.json", fix=fix)
    subject = find_subject(path, Overrides(context=context, kv_bits=_KV_BITS[kv], ar=ar, recipe=recipe))
    decoder = _decoder(subject)
    _check_context(subject)
    report = make_report(subject, device=device)
    strategy = report.recommendation
    (choice,) = (
        choice
        for choice, size in zip(CHOICES, report.strategies, strict=True)
        if (size.strategy, size.reserve) == (strategy.strategy, strategy.reserve)
    )
    weights = recipe_weights(decoder, recipe)
    demand = _demand(decoder, weights, subject.geometry, subject.ar, choice)
    load = Load(
        layers=[weights.layer_bytes] * weights.layers,
        packed=[weights.layer_packed_bytes] * weights.layers,
        embedding_bytes=weights.embedding_bytes,
        head_bytes=weights.head_bytes,
        layer_cache_bytes=-(-demand.cache_bytes // decoder.layers),
        activations_bytes=demand.activations_bytes,
        layer_graph_bytes=layer_graph_bytes(decoder),
        graphs=len(subject.ar),
    )
    splits = least_splits(load)
    parts = None if splits is None else lay_out(load, splits)
    cost = export_cost(decoder, weights, subject.geometry, subject.ar)
    speed = roofline(decoder, weights, subject.geometry, device)
    return Plan(
        verdict=make_plan_verdict(
            demand,
            device=device,
            context=subject.geometry.context,
            largest_context=_largest_context(decoder, weights, subject, choice),
            longest=subject.max_positions,
            with_u8=_with_u8(decoder, weights, subject, choice),
            parts=parts,
            strategy=strategy,
            export=cost,
            speed=speed,
        ),
        source=subject.source,
        device=device.soc,
        recipe=recipe,
        kv_dtype=subject.geometry.kv_dtype,
        context=subject.geometry.context,
        ar=list(subject.ar),
        parameters=decoder.layers * decoder.layer_parameters + 2 * decoder.table_parameters,
        strategy=strategy,
        demand=demand,
        parts=None if parts is None else list(parts),
        export=cost,
        roofline=speed,
        assumptions=[*subject.assumptions, *_OWN_ASSUMPTIONS, _protobuf(cost)],
    )


def _decoder(subject: Subject) -> Decoder:
    if subject.decoder is None:
        raise CheckpointError(
            subject.source,
            got="a model whose matrices are not known",
            expected="a decoder of the Llama family: llama, mistral, qwen2 or qwen3, with all sizes",
            fix="`edgekv size` says what its cache costs.",
        )
    return subject.decoder


def _check_context(subject: Subject) -> None:
    context, step, longest = subject.geometry.context, subject.ar[-1], subject.max_positions
    if longest is not None and context > longest:
        wanted = f"at most max_position_embeddings = {longest}"
        fix = f"Use --context {longest // step * step}."
        raise UsageError("--context", got=context, expected=wanted, fix=fix)
    if context % step:
        wanted = f"a multiple of the largest AR, {step}, which export asks for"
        raise UsageError("--context", got=context, expected=wanted, fix=f"Use --context {context // step * step}.")


def _demand(decoder: Decoder, weights: Weights, geometry: Geometry, ar: Sequence[int], choice: Choice) -> Demand:
    return Demand(
        weights_bytes=weights.total_bytes,
        cache_bytes=choice.held_bytes(geometry, ar),
        activations_bytes=activation_bytes(decoder, geometry, max(ar)),
        context_bytes=HTP_CONTEXT_BYTES,
    )


def _largest_context(decoder: Decoder, weights: Weights, subject: Subject, choice: Choice) -> int | None:
    step, longest = subject.ar[-1], subject.max_positions

    def is_within(context: int) -> bool:
        if longest is not None and context > longest:
            return False
        return _demand(decoder, weights, replace(subject.geometry, context=context), subject.ar, choice).fits

    return largest_multiple(step, is_within)


def _with_u8(decoder: Decoder, weights: Weights, subject: Subject, choice: Choice) -> bool:
    """Whether a cache of 8 bits would make the difference."""
    if subject.geometry.kv_dtype == "u8":
        return False
    return _demand(decoder, weights, replace(subject.geometry, kv_dtype="u8"), subject.ar, choice).fits


def _protobuf(cost: ExportCost) -> str:
    share = cost.graph_bytes / PROTOBUF_BYTES
    return (
        f"the 2 GB limit of a protobuf concerns a graph's own file, {share:.1%} of it here: weights lie beside it in "
        "safetensors shards"
    )
