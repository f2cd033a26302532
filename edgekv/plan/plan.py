"""The output of `edgekv plan`, as one typed object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from devices import Device
from edgekv.bundle import read_manifest
from edgekv.errors import CheckpointError, UsageError
from edgekv.plan.cache import CHOICES, Recommendation, recommend, strategy_cost
from edgekv.plan.estimate import Estimate, find_estimator
from edgekv.plan.export_cost import ExportCost, export_cost
from edgekv.plan.fit import Demand, Fit, MemoryLimit, check_cache_type, demand, divide_model, fit, mask_warnings
from edgekv.plan.host_speed import measure_host
from edgekv.plan.options import (
    DEFAULT_AR,
    DEFAULT_CONTEXT,
    DEFAULT_RECIPE,
    PROTOBUF_BYTES,
    Overrides,
    PlanOptions,
    shortened,
)
from edgekv.plan.parts import EncoderPlan, Part
from edgekv.plan.speed import SpeculativeSpeed, Speed, check_acceptance, estimate_speed, speculative_speed
from edgekv.plan.subject import Subject, find_subject, is_bundle
from edgekv.plan.wording import duration, duration_span, encoder_sentence, fit_sentences, gb, span
from edgekv.spec import CONFIG, FRONT, HEAD_MARK, MAX_BITS, MIN_BITS, RECIPE_TYPES, KvDtype, front_bits, head_type

RECIPES = tuple(RECIPE_TYPES)
_KV_BITS = {"u8": 8, "s16": 16}
_DEFAULTS = PlanOptions()
_OWN_ASSUMPTIONS = (
    "one HTP context holds 3.75 GB, a limit met in the field; compiled binaries, 1 to 3 % larger than their weights "
    "where they were measured, are counted as their weights",
    "activations are an upper estimate: the schedule of the HTP compiler is not known",
    "the device's RAM is not in the catalogue and was not checked",
    "export: RAM is fitted to models of up to 1 B parameters; `edgekv compile` is not included",
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A planned export of a model for a device.

    Attributes:
        summary: whether it fits, how fast it can be and what the export needs, in words.
        warnings: known problems on the device, and their fixes.
        fit: whether it fits.
        source: the file with the sizes.
        device: part number.
        recipe: integer types of weights and activations.
        kv_dtype: integer type of the cache.
        context: S, tokens.
        ar: tokens per inference of each graph.
        parameters: elements of all matrices; a tied head counts once.
        strategy: the update strategy used, and why.
        demand: bytes in HTP contexts.
        parts: parts of the graphs; None if a single layer is too large for an HTP context.
        encoder: of pictures, in an HTP context of its own; None if the model reads text alone.
        export: cost of the export, its encoder included but for the time.
        speed: how fast it can be.
        speculation: how fast with drafts, for each size of verify graphs; None without an acceptance.
        estimate: how fast by the compiler's simulation; None if it was not asked for.
        assumptions: what the plan is based on.
    """

    summary: str
    warnings: list[str]
    fit: Fit
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
    encoder: EncoderPlan | None
    export: ExportCost
    speed: Speed
    speculation: list[SpeculativeSpeed] | None
    estimate: Estimate | None
    assumptions: list[str]


def make_plan(path: Path, device: Device, options: PlanOptions = _DEFAULTS) -> Plan:
    """Plan the export of a model for a device.

    Args:
        path: a `config.json`, a folder that has one, a GGUF file, a hub id, or a bundle, whose own sizes and recipe
            are planned; no weights are read.
        device: the target.
        options: the graphs, and what is said of them.

    Raises:
        UsageError: options that export would refuse for this model and device, or an estimate for a chip that no
            simulated one stands for.
        EngineError: an estimate, and its packages are not installed.
        CheckpointError: a `config.json` that cannot be read, or a model whose weights are not known.
    """
    if (acceptance := options.acceptance) is not None:
        check_acceptance(acceptance)
    if options.estimate and (is_bundle(path) or (path / CONFIG if path.is_dir() else path).suffix != ".json"):
        fix = "Use edgekv estimate on a bundle, or give the config.json."
        raise UsageError("--estimate", got=f"it for {path.name}", expected=f"a {CONFIG}", fix=fix)
    subject, recipe = _find(path, options), options.recipe
    if is_bundle(path):
        recipe = read_manifest(path.parent if path.is_file() else path).recipe.name
    decoder, weights = subject.decoder, subject.weights
    if decoder is None or weights is None:
        raise CheckpointError(
            subject.source,
            got="a model whose matrices are not known",
            expected="an architecture that edgekv exports, with all sizes",
            fix="`edgekv size` says what its cache costs.",
        )
    _check_context(subject)
    check_cache_type(subject.geometry, device)
    limit, default = MemoryLimit.of_htp(), CHOICES[0]
    needed, memory_fit, parts = (
        demand(subject, default, limit),
        fit(subject, default, limit),
        divide_model(subject, default),
    )
    encoder = None if subject.encoder is None else EncoderPlan.of(subject.encoder)
    host = measure_host("lpbq64" if weights.is_mostly_packed else "int8")
    cost = export_cost(decoder, weights, subject.geometry, subject.ar, host, checks=options.checks)
    if encoder is not None:
        cost = cost.with_encoder(encoder)
    speed = estimate_speed(subject, decoder, weights, device)
    sentences = fit_sentences(subject, default, device, needed, memory_fit, _alternatives(subject, memory_fit))
    simulated = None
    if options.estimate:
        simulated = find_estimator()(path, device, replace(options, context=subject.geometry.context, ar=subject.ar))
    return Plan(
        summary=" ".join([*sentences, *_further_sentences(parts, encoder, cost, speed)]),
        warnings=mask_warnings(subject.geometry, subject.ar, device),
        fit=memory_fit,
        source=subject.source,
        device=device.soc,
        recipe=recipe,
        kv_dtype=subject.geometry.kv_dtype,
        context=subject.geometry.context,
        ar=list(subject.ar),
        parameters=decoder.parameters,
        strategy=recommend([strategy_cost(default, subject.geometry, subject.ar)]),
        demand=needed,
        parts=None if parts is None else list(parts),
        encoder=encoder,
        export=cost,
        speed=speed,
        estimate=simulated,
        speculation=None if acceptance is None else speculative_speed(subject, decoder, device, speed, acceptance),
        assumptions=[
            *subject.assumptions,
            *_OWN_ASSUMPTIONS,
            _speed_basis(device, speed),
            _published(speed),
            *(() if simulated is None else simulated.notes),
            _host(cost),
            _protobuf(cost),
        ],
    )


def _find(path: Path, options: PlanOptions) -> Subject:
    context, recipe, kv, ar = options.context, options.recipe, options.kv, options.ar
    base, _ = head_type(recipe)
    if base not in RECIPES and front_bits(base) is None:
        expected = " or ".join([*RECIPES, f"{FRONT}BITS, from {MIN_BITS} to {MAX_BITS} bits a weight"])
        expected += f", also with {HEAD_MARK}int4 behind it"
        raise UsageError(
            "--recipe", got=repr(shortened(recipe)), expected=expected, fix=f"Use --recipe {DEFAULT_RECIPE}."
        )
    if kv not in _KV_BITS:
        raise UsageError("--kv", got=repr(shortened(kv)), expected=" or ".join(_KV_BITS), fix="Use --kv u8.")
    if is_bundle(path):
        chosen = None if context == DEFAULT_CONTEXT else context
        return find_subject(path, Overrides(context=chosen, ar=None if ar == DEFAULT_AR else ar))
    return find_subject(path, Overrides(context=context, kv_bits=_KV_BITS[kv], ar=ar, recipe=recipe))


def _check_context(subject: Subject) -> None:
    context, step, longest = subject.geometry.context, subject.ar[-1], subject.max_positions
    if longest is not None and context > longest:
        expected = f"at most max_position_embeddings = {longest}"
        fix = f"Use --context {longest // step * step}."
        raise UsageError("--context", got=context, expected=expected, fix=fix)
    if context % step:
        expected = f"a multiple of the largest AR, {step}, which export needs"
        raise UsageError("--context", got=context, expected=expected, fix=f"Use --context {context // step * step}.")


def _alternatives(subject: Subject, memory_fit: Fit) -> list[str]:
    """Whether a cache of 8 bits would make it fit."""
    if memory_fit.fits or subject.geometry.kv_dtype == "u8":
        return []
    smaller = replace(subject, geometry=replace(subject.geometry, kv_dtype="u8"))
    return ["--kv u8"] if fit(smaller, CHOICES[0], MemoryLimit.of_htp()).fits else []


def _further_sentences(
    parts: Sequence[Part] | None, encoder: EncoderPlan | None, cost: ExportCost, speed: Speed
) -> list[str]:
    sentences = []
    if encoder is not None:
        sentences.append(encoder_sentence(encoder))
    if parts is not None and len(parts) > 1:
        peak = gb(max(part.compile_peak_bytes for part in parts))
        sentences.append(f"Export divides it into {len(parts)} parts; compiling one needs at most {peak} of RAM.")
    first = speed.first_token[0]
    sentences.append(
        f"Expect {span(*speed.tokens_per_s)} tokens a second, and {duration_span(first.low_s, first.high_s)} to "
        f"the first token of a prompt of {first.prompt_tokens:,}."
    )
    check = f", {duration(cost.check_seconds)} of it for the HTP check" if cost.check_seconds else ", without HTP check"
    sentences.append(f"The export needs about {gb(cost.peak_bytes)} of RAM and {duration(cost.seconds)}{check}.")
    return sentences


def _speed_basis(device: Device, speed: Speed) -> str:
    share = speed.reached_gb_per_s[1] / speed.dram_gb_per_s
    low, high = speed.reached_gb_per_s
    chips = " and ".join(filter(None, (", ".join(speed.measured_on[:-1]), speed.measured_on[-1])))
    whose = "this chip" if device.has_own_speed else f"{chips}; none were found for {device.soc}"
    if speed.pass_s * speed.tokens_per_s[1] > 0.999:
        least = f"a pass takes at least {1e3 * speed.pass_s:.1f} ms"
        if speed.evidence != "published":
            return f"speed: too small a model for bandwidth to matter; {least}, {speed.evidence}"
        return f"speed: too small a model for published figures; {least}, the fastest one published"
    if speed.evidence != "published" and _reads_measured(device, speed):
        return f"speed: decoders read at {span(low, high)} GB/s, at most {share:.0%} of the peak, {speed.evidence}"
    geniex = device.speed.geniex_gb_per_s
    with_geniex = "" if geniex is None else f", with GenieX at {span(geniex.low, geniex.high)} GB/s"
    return (
        f"speed: published decoders read at {span(low, high)} GB/s, at most {share:.0%} of the peak DRAM bandwidth"
        f"{with_geniex}; figures of {whose}: {speed.source}"
    )


def _reads_measured(device: Device, speed: Speed) -> bool:
    """Whether the bandwidth was measured on the device, and not only its passes."""
    return speed.reached_gb_per_s != (device.decode_gb_per_s.low, device.decode_gb_per_s.high)


def _published(speed: Speed) -> str:
    return f"nearest model: tokens a second of another model on the NPU, as {speed.published_source} has them"


def _host(cost: ExportCost) -> str:
    host = cost.host
    whose = (
        f"measured on this machine, of {host.cores} cores"
        if host.is_measured
        else (f"assumed, of {host.cores} cores: edgekv[export] is not installed")
    )
    return (
        f"export time: a core multiplies {host.products_per_s / 1e9:.0f} billion floats a second and rounds "
        f"{host.elements_per_s / 1e6:.2g} million, {whose}, if nothing else runs; exports of SmolLM2-135M and "
        "of two layers of Llama-3.2-1B took 0 to 6 % more than this says"
    )


def _protobuf(cost: ExportCost) -> str:
    share = cost.graph_bytes / PROTOBUF_BYTES
    return (
        f"the 2 GB limit of a protobuf concerns a graph's own file, {share:.1%} of it here: weights are in separate "
        "safetensors files"
    )
