"""Everything that `edgekv size` says, as one typed object."""

from __future__ import annotations

import msgspec

from devices import Device
from edgekv.kv import KvDtype
from edgekv.plan.cache.ports import GraphPorts, graph_ports
from edgekv.plan.cache.recommend import Recommendation, recommend
from edgekv.plan.cache.strategies import CHOICES, StrategySize, strategy_size
from edgekv.plan.cache.subject import Subject
from edgekv.plan.cache.verdict import Budget, Verdict, check_cache_type, fits, largest_context, make_verdict


class GeometryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of the cache; `tensors` is N = layers x 2 x kv_heads."""

    layers: int
    kv_heads: int
    head_dim: int
    context: int
    kv_bits: int
    kv_dtype: KvDtype
    tensors: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a cache costs.

    Attributes:
        source: where the sizes are from.
        assumptions: what was not given and taken to be so.
        verdict: whether it fits, if a device or a budget was given.
        geometry: the sizes.
        ar: tokens per inference of each graph.
        strategies: the cost of each update strategy, the default first.
        recommendation: which of them to choose, on the device if one was named.
        graphs: inputs and outputs of each graph.
    """

    source: str
    assumptions: list[str]
    verdict: Verdict | None
    geometry: GeometryRecord
    ar: list[int]
    strategies: list[StrategySize]
    recommendation: Recommendation
    graphs: list[GraphPorts]


def make_report(subject: Subject, *, device: Device | None = None, budget: Budget | None = None) -> Report:
    """Size a cache, with a verdict if a device or a budget is given.

    Args:
        subject: what to size.
        device: the target; its HTP must support the cache's type.
        budget: memory for weights and cache; without one, that of one HTP context if there is a device.

    Raises:
        UsageError: the device does not support the cache's type.
    """
    geometry = subject.geometry
    if device is not None:
        check_cache_type(geometry, device)
        budget = budget or Budget.of_htp()
    strategies = [strategy_size(choice, geometry, subject.ar) for choice in CHOICES]
    assumptions = list(subject.assumptions)
    verdict = None
    if budget is not None:
        verdict = make_verdict(CHOICES, subject, budget, device)
        assumptions.append("the whole model within one budget, activations not counted")
        strategies = [
            msgspec.structs.replace(
                size, fits=fits(choice, subject, budget), largest_context=largest_context(choice, subject, budget)
            )
            for choice, size in zip(CHOICES, strategies, strict=True)
        ]
    return Report(
        source=subject.source,
        assumptions=assumptions,
        verdict=verdict,
        geometry=GeometryRecord(
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            context=geometry.context,
            kv_bits=8 * geometry.element_bytes,
            kv_dtype=geometry.kv_dtype,
            tensors=geometry.tensors,
        ),
        ar=list(subject.ar),
        strategies=strategies,
        recommendation=recommend(strategies, device),
        graphs=[graph_ports(geometry, ar) for ar in subject.ar],
    )
