"""Experts as files have them: each by itself, or all of a layer as one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from edgekv.spec import DecoderSpec, View, expert_projection, stored_name
from exporters.checkpoint.stored import CheckpointTensor, StoredTensor


def with_stored_experts(spec: DecoderSpec, tensors: Mapping[str, CheckpointTensor]) -> DecoderSpec:
    """The decoder with experts stored as these tensors have them; as its architecture has them if neither is there."""
    if spec.experts is None:
        return spec
    at = f"model.layers.{min(spec.experts.layers)}."
    merged = stored_name(spec, f"{at}mlp.experts.gate_up_proj")
    single = stored_name(spec, f"{at}{expert_projection(0, 'gate_proj')}.weight")
    if merged in tensors:
        return msgspec.structs.replace(spec, fused=spec.fused | {"experts"})
    return msgspec.structs.replace(spec, fused=spec.fused - {"experts"}) if single in tensors else spec


def with_rows_of_experts(tensors: Mapping[str, CheckpointTensor], views: Iterable[View]) -> dict[str, CheckpointTensor]:
    """The tensors, those `[E, out, in]` of all experts as `[E * out, in]`."""
    by_rows = dict(tensors)
    for view in views:
        stored = by_rows[view.key] if view.stacked is not None else None
        if isinstance(stored, StoredTensor):
            by_rows[view.key] = replace(stored, shape=(view.rows, *view.shape[1:]))
    return by_rows
