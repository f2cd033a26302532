"""Describes the decoder of a configuration, or only its KV cache if the architecture is unknown."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import ARCHITECTURES, DRAFTERS
from edgekv.spec.harmless import OFF, harmless
from edgekv.spec.lacking import ENCODER, LACKING, OTHER_CACHES

LARGEST_PARAMETERS = 1 << 42
"""Maximum elements of all matrices, above every published model."""
LARGEST_HEADS = 1 << 18
"""Maximum query heads of all layers: each one adds operations to a graph."""

_LAYER_TYPES = ("full_attention", "sliding_attention")
_OTHER_CACHE_FIELDS = (
    "attn_layer_indices",
    "attn_layer_period",
    "block_types",
    "conv_L_cache",
    "cross_attention_layers",
    "full_attn_idxs",
    "hybrid_override_pattern",
    "is_encoder_decoder",
    "layers_block_type",
    "linear_attn_config",
    "lru_width",
    "mamba_d_state",
    "multi_query",
    "num_kv_heads",
    "num_kv_shared_layers",
    "per_layer_config",
    "ssm_state_size",
)
"""Fields of models some of whose layers keep no keys and values, another layer's, or others than the sizes say."""
_GIVE_SIZES = "Of its keys and values alone, give --layers, --kv-heads, --head-dim, --context and --kv-bits instead."
_LISTED = "docs/reference/architectures.md lists those that can be exported."


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The sizes of a KV cache, for any architecture that keeps keys and values of each layer and head.

    Attributes:
        layers: decoder layers.
        heads: query heads of a layer.
        kv_heads: key/value heads of a layer.
        head_dim: D.
        max_positions: the model's maximum context, or None if the configuration does not say.
        sliding_window: maximum tokens that some or all layers attend to, or None.
        decoder: the whole decoder, or None if its architecture cannot be exported.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int | None
    sliding_window: int | None
    decoder: DecoderSpec | None


def describe(config: Config) -> DecoderSpec:
    """The decoder of a configuration.

    Raises:
        CheckpointError: the architecture is unknown, or a field is missing, contradictory, too large or not supported.
    """
    model_type = config.text("model_type")
    family = ARCHITECTURES.get(model_type)
    if family is None:
        _check_no_drafter(config)
        if lacking := LACKING.get(model_type, ENCODER if config.table("text_config") else ""):
            fix = f"Graphs have no such thing; {_LISTED}"
            raise config.refusal("model_type", f"an architecture without {lacking}", fix=fix)
        raise config.refusal("model_type", "an architecture that can be exported", fix=f"The page {_LISTED}")
    _check_attention(config)
    spec = family(config)
    config.check_read(harmless(model_type), OFF)
    _check_products(config, spec)
    return spec


def describe_drafter(config: Config, target: DecoderSpec) -> DecoderSpec:
    """The drafter of a configuration, for a target.

    Raises:
        CheckpointError: it is no drafter, one for another target, or a field is missing, too large or not supported.
    """
    model_type = config.text("model_type")
    if (family := DRAFTERS.get(model_type)) is None:
        fix = "Leave --draft-for out: other models draft with their own caches."
        raise config.refusal("model_type", " or ".join(sorted(DRAFTERS)), fix=fix)
    spec = family(config, target)
    config.check_read(harmless(model_type))
    if spec.target is not None and not spec.target.is_cached_apart:
        _check_layers(config.text_decoder())
    _check_products(config, spec)
    return spec


def describe_cache(config: Config) -> CacheSpec:
    """The KV cache of a configuration, even of an unknown architecture.

    Raises:
        CheckpointError: a field is missing, contradictory or too large, or the model has another kind of cache.
    """
    if config.text("model_type", "") in ARCHITECTURES:
        spec = describe(config)
        windows = [window for window in spec.windows if window is not None]
        return CacheSpec(
            spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.max_positions, max(windows, default=None), spec
        )
    _check_no_drafter(config)
    config = config.text_decoder()
    if config.text("model_type", "") in ARCHITECTURES:
        return describe_cache(config)
    _check_layers(config)
    _check_every_layer(config)
    layers = config.size("num_hidden_layers")
    heads = config.size("num_attention_heads", config.optional_size("num_key_value_heads"))
    head_dim = config.optional_size("head_dim") or config.size("hidden_size") // heads
    if not head_dim:
        raise config.refusal("hidden_size", f"at least num_attention_heads = {heads}")
    if config.optional_size("v_head_dim") not in (None, head_dim):
        raise config.refusal("v_head_dim", f"{head_dim}, as many elements as keys have", fix=_GIVE_SIZES)
    if layers * heads > LARGEST_HEADS:
        raise config.refusal("num_hidden_layers", f"at most {LARGEST_HEADS} heads in all layers together")
    return CacheSpec(
        layers,
        heads,
        config.size("num_key_value_heads", heads),
        head_dim,
        config.optional_size("max_position_embeddings"),
        config.optional_size("sliding_window"),
        None,
    )


def _check_no_drafter(config: Config) -> None:
    if config.text("model_type", "") in DRAFTERS:
        fix = "It is a drafter. Export its target with --give-hidden, then this with --draft-for BUNDLE."
        raise config.refusal("model_type", "a model that needs no target", fix=fix)


def _check_attention(config: Config) -> None:
    """Reject attention that does not keep keys and values of each head."""
    if "kv_lora_rank" in config:
        expected = "keys and values for each head"
        raise config.refusal("kv_lora_rank", expected, fix="Models with latent attention are not supported.")


def _check_layers(config: Config) -> None:
    """Reject layers that do not keep keys and values of each head."""
    _check_attention(config)
    if "layer_types" in config and (other := set(config.layer_types()) - {*_LAYER_TYPES}):
        expected, fix = " or ".join(_LAYER_TYPES), "Models with layers of another kind are not supported."
        raise config.refusal("layer_types", expected, got=", ".join(sorted(other))[:200], fix=fix)


def _check_every_layer(config: Config) -> None:
    """Reject models, other than those that can be exported, some of whose layers have another cache."""
    if (what := LACKING.get(config.text("model_type", ""), "")) in OTHER_CACHES:
        raise config.refusal("model_type", f"an architecture without {what}", fix=_GIVE_SIZES)
    for name in _OTHER_CACHE_FIELDS:
        if config.fields.get(name):
            raise config.refusal(name, "no such field: the same keys and values in every layer", fix=_GIVE_SIZES)


def _check_products(config: Config, spec: DecoderSpec) -> None:
    if spec.layers * spec.heads > LARGEST_HEADS:
        raise config.refusal("num_hidden_layers", f"at most {LARGEST_HEADS} heads in all layers together")
    sizes = spec.sizes
    parameters = math.fsum([sizes.all_layer_parameters, sizes.table_parameters])
    if parameters > LARGEST_PARAMETERS:
        got = f"sizes of {parameters:.3g} parameters"
        raise config.refusal("hidden_size", f"at most {LARGEST_PARAMETERS:,} parameters", got=got)
