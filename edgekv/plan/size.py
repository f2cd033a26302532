"""The output of `edgekv size`, as one typed object."""

from __future__ import annotations

import msgspec

from devices import Device
from edgekv.plan.cache import (
    GraphPorts,
    Recommendation,
    StrategyCost,
    choices_for,
    estimate,
    graph_ports,
    recommend,
    strategy_cost,
)
from edgekv.plan.encoder import EncoderPlan
from edgekv.plan.fit import Demand, Fit, MemoryLimit, check_cache_type, demand, fit
from edgekv.plan.subject import Subject
from edgekv.plan.wording import fit_sentences
from edgekv.spec import Geometry, KvDtype, LayeredGeometry


class LayersRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that attend to the same number of tokens.

    Attributes:
        layers: number of layers.
        window: tokens that they attend to, including the new one.
        tensors: cache tensors of these layers.
    """

    layers: int
    window: int
    tensors: int


class GeometryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of the cache; `tensors` is N = layers x 2 x kv_heads."""

    layers: int
    kv_heads: int
    head_dim: int
    context: int
    kv_bits: int
    kv_dtype: KvDtype
    tensors: int
    windows: list[LayersRecord]

    @classmethod
    def of(cls, geometry: Geometry | LayeredGeometry) -> GeometryRecord:
        groups = geometry.groups()
        return cls(
            layers=geometry.layers,
            kv_heads=groups[0].kv_heads,
            head_dim=groups[0].head_dim,
            context=geometry.context,
            kv_bits=8 * groups[0].element_bytes,
            kv_dtype=geometry.kv_dtype,
            tensors=geometry.tensors,
            windows=[LayersRecord(layers=each.layers, window=each.context, tensors=each.tensors) for each in groups],
        )


class SizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a cache.

    Attributes:
        summary: whether it fits, in words, if a device or a limit was given.
        source: source of the sizes.
        device: part number of the device, if one was named.
        fit: whether it fits with the default strategy, if a device or a limit was given.
        demand: bytes that this strategy needs.
        geometry: the sizes.
        ar: tokens per inference of the graphs that decode and prefill.
        textbook_bytes: keys and values of S tokens by the textbook formula.
        strategies: the cost of each update strategy, the default first.
        recommendation: the strategy to choose.
        graphs: inputs and outputs of each graph.
        encoder: of pictures, in an HTP context of its own; None if the model reads text alone.
        max_positions: the model's maximum context, if known.
        assumptions: assumed values that were not given.
    """

    summary: str | None
    source: str
    device: str | None
    fit: Fit | None
    demand: Demand | None
    geometry: GeometryRecord
    ar: list[int]
    textbook_bytes: int
    strategies: list[StrategyCost]
    recommendation: Recommendation
    graphs: list[GraphPorts]
    encoder: EncoderPlan | None
    max_positions: int | None
    assumptions: list[str]


def make_size_report(subject: Subject, *, device: Device | None = None, limit: MemoryLimit | None = None) -> SizeReport:
    """Size a cache, and say whether it fits if a device or a limit is given.

    Args:
        subject: what to size.
        device: the target; its HTP must support the cache's type.
        limit: memory for weights, cache and activations; with a device and no limit, that of HTP contexts.

    Raises:
        UsageError: the device does not support the cache's type.
    """
    geometry = subject.geometry
    if device is not None:
        check_cache_type(geometry, device)
        limit = limit or MemoryLimit.of_htp()
    choices = choices_for(geometry)
    costs = [strategy_cost(choice, geometry, subject.steps) for choice in choices]
    needed, found, summary = None, None, None
    if limit is not None:
        fits = [fit(subject, choice, limit) for choice in choices]
        costs = [
            msgspec.structs.replace(cost, fits=each.fits, largest_context=each.largest_context)
            for cost, each in zip(costs, fits, strict=True)
        ]
        needed, found = demand(subject, choices[0], limit), fits[0]
        others = [f"--kv-update {choice.label}" for choice, each in zip(choices, fits, strict=True) if each.fits]
        summary = " ".join(fit_sentences(subject, choices[0], device, needed, found, others))
    record = GeometryRecord.of(geometry)
    return SizeReport(
        summary=summary,
        source=subject.source,
        device=None if device is None else device.soc,
        fit=found,
        demand=needed,
        geometry=record,
        ar=list(subject.ar),
        textbook_bytes=estimate(
            layers=record.layers,
            kv_heads=record.kv_heads,
            head_dim=record.head_dim,
            tokens=record.context,
            element_bytes=record.kv_bits // 8,
        ),
        strategies=costs,
        recommendation=recommend(costs),
        graphs=[graph_ports(geometry, role, ar, subject.rotary) for role, ar in subject.graphs],
        encoder=None if subject.encoder is None else EncoderPlan.of(subject.encoder),
        max_positions=subject.max_positions,
        assumptions=list(subject.assumptions),
    )
