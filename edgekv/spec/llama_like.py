"""The fields that most architectures share: a Llama-like decoder, and attention windows by layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import Convolution, DecoderSpec, Experts, LayerSizes
from edgekv.spec.linear import DeltaRule
from edgekv.spec.rope import THETA, Rope

ATTENTION_INPUTS = frozenset({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"})
ATTENTION = ATTENTION_INPUTS | {"self_attn.o_proj"}
MLP = frozenset({"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"})

_MAMBA2 = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": [0.0, float("inf")],
}
"""Fields of Mamba-2 and their defaults."""
_FULL, _SLIDING, _CONVOLUTION = "full_attention", "sliding_attention", "conv"


def llama_like(config: Config, *, partial: bool = False, two_ropes: bool = False) -> DecoderSpec:
    """A Llama-like decoder: the sizes and the rotary embedding of a configuration.

    Args:
        config: the configuration with the defaults of its architecture. By default head_dim is hidden_size /
            num_attention_heads, and there are as many key/value heads as heads.
        partial: see `Rope.from_config`.
        two_ropes: whether there is one for each kind of attention, which the caller reads.

    Raises:
        CheckpointError: naming the field that is missing or contradicts another.
    """
    config.expect("is_causal", True)
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    if "head_dim" not in config and hidden % heads:
        raise config.refusal("hidden_size", f"a multiple of num_attention_heads = {heads}")
    dim = config.size("head_dim", max(1, hidden // heads))
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.refusal("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if dim % 2:
        raise config.refusal("head_dim", "an even number")
    return DecoderSpec(
        model_type=config.text("model_type"),
        layers=config.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        intermediate=config.size("intermediate_size"),
        vocab=config.size("vocab_size"),
        max_positions=config.size("max_position_embeddings"),
        eps=config.number("rms_norm_eps", 1e-6),
        tied_head=config.flag("tie_word_embeddings"),
        rope=Rope("default", THETA, dim, {}) if two_ropes else Rope.from_config(config, dim, partial=partial),
        query_gain=dim**-0.5,
    )


def text_config(config: Config, *model_types: str, tied: bool = True) -> Config:
    """The text model of a multimodal configuration, whose own `tie_word_embeddings` goes first.

    Args:
        config: the whole configuration.
        model_types: of text models that can be exported; the first is the default.
        tied: the architecture's default of `tie_word_embeddings`.

    Raises:
        CheckpointError: it is another text model.
    """
    text = config.table("text_config").with_defaults(model_type=model_types[0])
    if text.text("model_type") not in model_types:
        expected = " or ".join(model_types)
        raise text.refusal("model_type", expected, fix="This text model cannot be exported.")
    tied = config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", tied))
    return text.changed(tie_word_embeddings=tied)


def text_positions(config: Config) -> Config:
    """The text model's configuration with a rotary embedding of one position instead of sections (`mrope`).

    Where there is only text, all sections have the same position.
    """
    changed = {}
    for name in ("rope_scaling", "rope_parameters"):
        if name in config:
            table = config.table(name)
            table.ignore("mrope_section", "mrope_interleaved")
            if table.text("rope_type", table.text("type", "default")) == "mrope":
                changed[name] = table.fields | {"rope_type": "default"}
    return config.changed(**changed)


def biases(config: Config) -> frozenset[str]:
    """The projections with a bias, as `attention_bias` and `mlp_bias` say."""
    attention, mlp = config.flag("attention_bias"), config.flag("mlp_bias")
    return (ATTENTION if attention else frozenset[str]()) | (MLP if mlp else frozenset[str]())


def with_layer_norms(spec: DecoderSpec, eps: float, biased: frozenset[str]) -> DecoderSpec:
    """A decoder whose norms take the mean away and have biases.

    Args:
        spec: the decoder before.
        biased: projections whose biases checkpoints have.
    """
    readers = ATTENTION_INPUTS | {"mlp.up_proj", "lm_head"} | ({"mlp.gate_proj"} if spec.gated else set())
    return replace(
        spec, eps=eps, layer_norms=True, norm_biases=True, biased=biased | readers, made_biases=readers - biased
    )


def same_window(config: Config, layers: int, window: int | None) -> tuple[int | None, ...]:
    """One window for all layers, or none.

    Raises:
        CheckpointError: `layer_types` contradicts it.
    """
    kind = _FULL if window is None else _SLIDING
    if "layer_types" in config and (others := set(config.layer_types(layers)) - {kind}):
        reason = "there is no sliding_window" if window is None else "sliding_window says"
        raise config.refusal("layer_types", f"{kind} alone, as {reason}", got=", ".join(sorted(others))[:200])
    return () if window is None else (window,) * layers


_SHARED_EXPERTS = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "num_shared_experts",
    "n_shared_experts",
)


def experts(
    config: Config,
    layers: Collection[int],
    *,
    count: str,
    width: str = "moe_intermediate_size",
    used: str = "num_experts_per_tok",
    normalized: bool = True,
) -> Experts:
    """The experts of these layers, whose router is a softmax.

    Args:
        config: the configuration with the defaults of its architecture.
        layers: their numbers.
        count: field with the number of experts of a layer.
        width: field with the width of an expert.
        used: field with the experts of a token.
        normalized: see `Experts`.

    Raises:
        CheckpointError: a token has more experts than there are, there is a shared one, or a size is none.
    """
    for name in _SHARED_EXPERTS:
        if config.count(name, 0):
            fix = "Take a model without shared experts, such as Granite-3.1-1B-A400M."
            raise config.refusal(name, "0: graphs have no expert that every token shares", fix=fix)
    if (number := config.size(count)) < 2:
        raise config.refusal(count, "at least 2 experts")
    if (used_number := config.size(used)) > number:
        raise config.refusal(used, f"at most {count} = {number}")
    return Experts(
        count=number,
        used=used_number,
        intermediate=config.size(width),
        layers=frozenset(layers),
        normalized=normalized,
    )


def unrotated(config: Config, layers: int, interval: int) -> frozenset[int]:
    """The layers without a rotary embedding: by `no_rope_layers` (1: rotated), or the last of each `interval`."""
    if "no_rope_layers" in config:
        config.ignore("no_rope_layer_interval")
        return frozenset(layer for layer, rotates in enumerate(config.flags("no_rope_layers", layers)) if not rotates)
    interval = config.size("no_rope_layer_interval", interval)
    return frozenset(range(interval - 1, layers, interval))


def convolution(config: Config, layers: int, kernel: int, chosen: Collection[int]) -> Convolution | None:
    """The layers with a short convolution, and its kernel; None if all have attention.

    Args:
        config: the configuration; its `layer_types` lists the layers.
        layers: number of layers.
        kernel: the architecture's default.
        chosen: the layers without `layer_types`.

    Raises:
        CheckpointError: no layer has attention, or a kernel that is none.
    """
    config.expect("conv_bias", False)
    if "layer_types" in config:
        kinds = config.layer_types(layers)
        if not set(kinds) <= {_FULL, _SLIDING, _CONVOLUTION}:
            raise config.refusal("layer_types", f"{_FULL}, {_SLIDING} or {_CONVOLUTION} for each layer")
        chosen = [layer for layer, kind in enumerate(kinds) if kind == _CONVOLUTION]
    kernel = config.size("conv_L_cache", kernel)
    if kernel < 2:
        raise config.refusal("conv_L_cache", "a kernel of at least 2 tokens")
    if len(chosen) == layers:
        field = "layer_types" if "layer_types" in config else "num_hidden_layers"
        raise config.refusal(field, f"at least one layer with {_FULL}")
    return Convolution(frozenset(chosen), kernel) if chosen else None


def mamba2(config: Config, layers: frozenset[int], width: int | None = None) -> DeltaRule | None:
    """Mamba-2 of some layers; None if there are none: then its sizes, which configurations have too, are not read.

    Args:
        config: the configuration, with the names of Bamba's.
        layers: their numbers.
        width: of the values of all heads, if the architecture does not say it by `mamba_expand`.

    Raises:
        CheckpointError: sizes that contradict each other, or biases of projections.
    """
    config = config.with_defaults(**_MAMBA2)
    config.ignore(*_MAMBA2)
    if not layers:
        return None
    config.expect("mamba_proj_bias", False)
    heads, groups = config.size("mamba_n_heads"), config.size("mamba_n_groups")
    if heads % groups:
        raise config.refusal("mamba_n_heads", f"a multiple of mamba_n_groups = {groups}")
    expanded = config.size("mamba_expand") * config.size("hidden_size")
    product = f"mamba_expand * hidden_size = {expanded}" if width is None else str(width)
    width = width or expanded
    if width % heads:
        raise config.refusal("mamba_n_heads", f"a divisor of {product}")
    config.expect("mamba_d_head", width // heads, "auto")
    kernel = config.size("mamba_d_conv")
    if kernel < 2:
        raise config.refusal("mamba_d_conv", "a kernel of at least 2 tokens")
    return DeltaRule(
        layers,
        kernel,
        groups,
        heads,
        config.size("mamba_d_state"),
        width // heads,
        corrects=False,
        kernel_bias=config.flag("mamba_conv_bias"),
        step_limits=config.limits("time_step_limit"),
    )


def windows(
    config: Config, layers: int, window: int | None, slides: Callable[[int], bool], *, others: Collection[str] = ()
) -> tuple[int | None, ...]:
    """The attention window of each layer, None for full attention; empty if no layer has a window.

    Args:
        config: the configuration; its `layer_types` lists the layers that slide.
        layers: number of layers.
        window: tokens.
        slides: the architecture's rule by layer, used without `layer_types`.
        others: further kinds of layers, which have no window.

    Raises:
        CheckpointError: `layer_types` is not a list of known kinds for all layers, or a sliding layer has no window.
    """
    if "layer_types" in config:
        kinds = config.layer_types(layers)
        if not set(kinds) <= {_FULL, _SLIDING, *others}:
            raise config.refusal("layer_types", f"{' or '.join((_FULL, _SLIDING, *others))} for each layer")
        sliding = [kind == _SLIDING for kind in kinds]
    else:
        sliding = [slides(layer) for layer in range(layers)]
    if not any(sliding):
        return ()
    if window is None:
        raise config.refusal("sliding_window", "a whole number above 0, since layers slide")
    return tuple(window if slides else None for slides in sliding)


def cache_owners(config: Config, is_full: Sequence[bool]) -> tuple[int, ...]:
    """By layer, the layer whose keys and values it reads: the last `num_kv_shared_layers` layers have no others.

    Each of them reads those of the last layer before them that has full attention as well, or a window as well.

    Args:
        is_full: of each layer, whether it has full attention.

    Returns:
        A number for each layer; empty if each layer has its own.

    Raises:
        CheckpointError: no such layer is before them.
    """
    layers, name = len(is_full), "num_kv_shared_layers"
    if (sharing := config.count(name, 0)) == 0:
        return ()
    if sharing >= layers:
        raise config.refusal(name, f"fewer than num_hidden_layers = {layers}")
    first = layers - sharing
    owners = [*range(first)]
    for kind in is_full[first:]:
        owner = next((layer for layer in reversed(range(first)) if is_full[layer] == kind), None)
        if owner is None:
            expected = f"a layer with {_FULL if kind else _SLIDING} among the first {first}, which share their cache"
            raise config.refusal(name, expected, fix="Sharing cannot point forward: correct layer_types or this field.")
        owners.append(owner)
    return tuple(owners)


def layer_sizes(
    config: Config, spec: DecoderSpec, is_full: Sequence[bool], owners: Sequence[int], head_dim: int
) -> tuple[LayerSizes, ...]:
    """The sizes of each layer.

    Files of the hub have `global_head_dim` for layers with full attention, those that transformers 5 writes have
    `per_layer_config`.

    Args:
        spec: the sizes of the other layers.
        is_full: of each layer, whether it has full attention.
        owners: see `cache_owners`; layers that share a cache have twice the feed-forward if `use_double_wide_mlp`.
        head_dim: the architecture's default of `global_head_dim`.

    Raises:
        CheckpointError: a size is none, or layers of one kind differ.
    """
    own, layers = config.table("per_layer_config"), []
    keys = _layer_keys(config, own, len(is_full))
    full_dim, is_wide = config.size("global_head_dim", head_dim), config.flag("use_double_wide_mlp")
    if config.is_given("per_layer_config"):
        full_dim = spec.head_dim
    sizes: dict[bool, tuple[int, int]] = {}
    for layer, full in enumerate(is_full):
        table = own.table(keys.get(layer, str(layer)))
        if unknown := {*table.names} - {"head_dim", "num_key_value_heads"}:
            raise config.refusal("per_layer_config", "head_dim and num_key_value_heads", got=", ".join(sorted(unknown)))
        dim = table.size("head_dim", full_dim if full else spec.head_dim)
        kv_heads = table.size("num_key_value_heads", spec.kv_heads)
        if dim % 2:
            raise config.refusal("global_head_dim", "an even number", got=str(dim))
        if spec.heads % kv_heads:
            raise table.refusal("num_key_value_heads", f"a divisor of num_attention_heads = {spec.heads}")
        if sizes.setdefault(full, (dim, kv_heads)) != (dim, kv_heads):
            raise config.refusal("per_layer_config", "one head_dim for each kind of layer", got=f"another in {layer}")
        widens = is_wide and bool(owners) and owners[layer] != layer
        layers.append(LayerSizes(kv_heads, dim, spec.intermediate * (2 if widens else 1)))
    return tuple(layers)


def _layer_keys(config: Config, table: Config, layers: int) -> dict[int, str]:
    """By layer, its key in a table: a number, which transformers pads with zeros to the same length."""
    keys = {int(name): name for name in table.names if _is_below(name, layers)}
    if len(keys) != len(table):
        raise config.refusal(
            "per_layer_config", f"one entry for a layer, from 0 to {layers - 1}", got=", ".join(table.names)[:200]
        )
    return keys


def _is_below(name: str, layers: int) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 8 and int(name) < layers


def with_gemma4_layers(
    config: Config,
    spec: DecoderSpec,
    layer_windows: tuple[int | None, ...],
    sizes: tuple[LayerSizes, ...],
    *,
    theta: float,
    local_theta: float,
) -> DecoderSpec:
    """Gemma's decoder with the layers of Gemma 4; `theta` and `local_theta` where the configuration has none."""
    whole = [size for size, window in zip(sizes, layer_windows or [None] * len(sizes), strict=True) if window is None]
    widest = whole[0].head_dim if whole else spec.head_dim
    full, local = Rope.pair(config, widest, theta=theta, local_theta=local_theta, local_head_dim=spec.head_dim)
    return replace(
        spec,
        rope=full,
        local_rope=local if any(layer_windows) else None,
        qk_norm="head",
        value_norm=True,
        norm_offset=0.0,
        query_gain=1.0,
        windows=layer_windows,
        layer_sizes=sizes,
        layer_scalars=True,
    )
