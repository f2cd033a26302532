"""Drafters whose layers read the keys and values of another model, their target: one decoder behind the other."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec, TargetState

OTHER_TARGET = "Give the target that the drafter was trained for."


def behind_target(config: Config, own: DecoderSpec, target: DecoderSpec) -> DecoderSpec:
    """A drafter's layers, numbered behind those of its target, with the owners of the caches that they read.

    Each reads the last layer of the target that has keys and values of its own, and the same attention window.

    Args:
        config: the drafter's text configuration, for errors.
        own: the drafter as if it were a model of its own.

    Raises:
        CheckpointError: the target has no such layer, or one with heads of other sizes.
    """
    windows = own.windows or (None,) * own.layers
    owners = tuple(_owner(config, target, windows[layer]) for layer in range(own.layers))
    for layer, owner in enumerate(owners):
        sizes, shared = own.of_layer(layer), target.of_layer(owner)
        if (sizes.kv_heads, sizes.head_dim) != (shared.kv_heads, shared.head_dim):
            heads = f"{shared.kv_heads} heads of {shared.head_dim}, as layer {owner} of the target"
            got = f"{sizes.kv_heads} heads of {sizes.head_dim} in layer {layer}"
            raise config.refusal("num_key_value_heads", heads, got=got, fix=OTHER_TARGET)
    before = range(target.layers)
    return replace(
        own,
        layers=target.layers + own.layers,
        max_positions=target.max_positions,
        tied_head=False,  # the embeddings are the target's, projected
        embedding_gain=1.0,
        windows=(*(target.windows or (None,) * target.layers), *windows),
        limits=target.limits,
        layer_sizes=(*map(target.of_layer, before), *map(own.of_layer, range(own.layers))),
        cache_owners=(*map(target.cache_layer, before), *owners),
        target=TargetState(target.layers, target.hidden),
    )


def _owner(config: Config, target: DecoderSpec, window: int | None) -> int:
    windows = target.windows or (None,) * target.layers
    layers = (layer for layer in reversed(range(target.layers)) if target.owns_cache(layer))
    owner = next((layer for layer in layers if target.has_attention(layer) and windows[layer] == window), None)
    if owner is None:
        expected = f"layers of the target with {'full attention' if window is None else f'a window of {window} tokens'}"
        raise config.refusal("layer_types", expected, fix=OTHER_TARGET)
    return owner
