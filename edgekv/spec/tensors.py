"""The tensors of a decoder: names, shapes, what a checkpoint stores under them, and what can be folded into what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgekv.spec.decoder import DecoderSpec, Experts, Pairs
from edgekv.spec.linear import DeltaRule

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
HEAD_TURN = "lm_head.turn.weight"
HEAD_BIAS = "lm_head.bias"
TARGET_IN, TARGET_OUT = "pre_projection.weight", "post_projection.weight"
"""Of a drafter: from the last hidden state of its target, and back to it."""
EMBEDDING_IN, TARGET_FRAME = "pre_projection.embedding.weight", "pre_projection.frame.weight"
"""Of a drafter with a cache of its own: from the embedding, and from the hidden state as the target's graphs give it to
the one that the drafter was trained on."""
CONVOLUTION_INPUTS = ("conv.b_proj", "conv.c_proj", "conv.x_proj")
"""The gates before and after a short convolution, and what it filters, in the order of the stored matrix."""
DELTA_INPUTS = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a")
"""What a gated delta rule reads: queries, keys and values; the gate of its output; strengths; and decays. See
`delta_inputs`."""
DELTA_RATES = "linear_attn.A_log"
XIELU_BETA = 0.5
"""What xIELU multiplies x by, beside what its two numbers do: a constant that checkpoints store."""
EMBEDDING_STEPS = "model.embed_tokens.steps"
EMBEDDING_COLUMNS = "model.embed_tokens.columns"
LAYER_INPUTS = "model.layer_inputs.weight"
PICTURE_PLACES = "pictures.places"
"""Of each token its row and column in a picture, and how far the text moves on behind it: 0, 0 and 1 of a text."""
"""What each layer reads of each token, `[V, layers * P]`: it follows from the token alone, so the host gathers it.

In Gemma 4 it is `(norm(embedding @ projection.T / sqrt(H)) + table * sqrt(P)) / sqrt(2)`, with the three tensors below.
"""
LAYER_TABLE = "model.embed_tokens_per_layer.weight"
LAYER_TABLE_PROJECTION = "model.per_layer_model_projection.weight"
LAYER_TABLE_NORM = "model.per_layer_projection_norm.weight"

TensorRole = Literal[
    "embedding", "norm", "norm_bias", "q_norm", "k_norm", "q", "k", "v", "o", "head_gate",
    "conv_b", "conv_c", "conv_x", "kernel", "kernel_bias", "conv_out",
    "delta_qkv", "delta_z", "delta_a", "delta_b", "delta_rate", "delta_scale", "delta_norm", "delta_out",
    "gate", "up", "down", "router", "expert_score", "expert_gate", "expert_up", "expert_down",
    "activation", "layer_gate", "layer_out", "layer_scalar", "turn", "head", "layer_inputs",
    "target_in", "target_out", "target_frame", "embedding_in",
]  # fmt: skip

_ROLES: dict[str, TensorRole] = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.g_proj": "head_gate",
    "conv.b_proj": "conv_b",
    "conv.c_proj": "conv_c",
    "conv.x_proj": "conv_x",
    "conv.out_proj": "conv_out",
    "linear_attn.in_proj_qkv": "delta_qkv",
    "linear_attn.in_proj_z": "delta_z",
    "linear_attn.in_proj_b": "delta_b",
    "linear_attn.in_proj_a": "delta_a",
    "linear_attn.out_proj": "delta_out",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "mlp.router": "router",
    "per_layer_input_gate": "layer_gate",
    "per_layer_projection": "layer_out",
}


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of the decoder as a part of a stored one: `(stored[first:first + shape[0]] + offset) * gain`.

    Matrices are `[out, in]`; see `by_inputs`.

    Attributes:
        name: the decoder's name for it, as in Llama's checkpoints.
        shape: of the part.
        key: name of the stored tensor.
        rows: of the stored tensor.
        role: what the decoder does with it; a bias has the role of its projection.
        layer: None outside of the layers.
        norm: the norm whose output a matrix reads; its weights can be folded into the matrix.
        first: the first row of the part in the stored tensor.
        blocks: rows of the part's blocks, and rows from the first of one to the first of the next in the stored tensor,
            which has those of other parts between; None if the part's rows follow each other.
        pairs: how the pairs are stored that a rotary embedding turns, R and D, if rows belong to heads of D rows whose
            first R are turned; None if they are R/2 apart, as here.
        repeats: how often each row of the stored tensor follows as a row of the part.
        norm_bias: of a bias, that of the norm which its projection reads: the matrix times the norm's bias is added.
            If checkpoints have no other bias, the stored tensor is the norm's.
        is_stored: whether checkpoints have it; if not, its elements are 1.
        stored_as: what is stored of x: `log(-x)`, `log(-1 / x)`, or what softplus makes x of; None if it is x.
        stacked: of a stored tensor `[stacked, rows / stacked, in]`, as experts have it: its rows are counted through.
        offset: added to every element.
        gain: multiplies every element.
        row_gains: multiply the rows of parts that follow each other: rows of each, and its factor; empty if none do.
    """

    name: str
    shape: tuple[int, ...]
    key: str
    rows: int
    role: TensorRole
    layer: int | None = None
    norm: str | None = None
    first: int = 0
    offset: float = 0.0
    gain: float = 1.0
    blocks: tuple[int, int] | None = None
    pairs: tuple[Pairs, int, int] | None = None
    repeats: int = 1
    norm_bias: str | None = None
    is_stored: bool = True
    stacked: int | None = None
    stored_as: Literal["log", "inverse-log", "softplus"] | None = None
    row_gains: tuple[tuple[int, float], ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored tensor."""
        if self.stacked is not None:
            return (self.stacked, self.rows // self.stacked, *self.shape[1:])
        return (self.rows, *self.shape[1:])

    @property
    def is_reordered(self) -> bool:
        """Whether its rows are not neighbours in the stored tensor, in their order."""
        return self.blocks is not None or self.pairs is not None or self.repeats > 1

    def stored_rows(self, rows: slice | NDArray[np.int64]) -> slice | NDArray[np.int64]:
        """Which rows of the stored tensor some of its rows are."""
        if not self.is_reordered and isinstance(rows, slice):
            first, stop, _ = rows.indices(self.shape[0])
            return slice(self.first + first, self.first + stop)
        chosen = np.arange(self.shape[0])[rows] // self.repeats
        if self.pairs is not None:
            stored, width, dim = self.pairs
            order = np.arange(dim)
            pairs = order[:width].reshape(-1, 2).T if stored == "interleaved" else order[:width].reshape(2, -1)[::-1]
            order[:width] = pairs.reshape(-1)
            chosen = chosen // dim * dim + order[chosen % dim]
        if self.blocks is not None:
            rows_of_block, apart = self.blocks
            chosen = chosen + chosen // rows_of_block * (apart - rows_of_block)
        return self.first + chosen

    @property
    def is_matrix(self) -> bool:
        """Whether it has two dimensions; norms and biases have one, kernels of convolutions three."""
        return len(self.shape) == 2

    @property
    def writes_residual(self) -> bool:
        """Whether its output channels are those of the residual."""
        return self.role in ("o", "conv_out", "delta_out", "down", "expert_down", "layer_out")

    @property
    def is_multiplied(self) -> bool:
        """Whether it is a matrix that activations are multiplied by."""
        return self.is_matrix and self.role not in ("embedding", "layer_inputs")

    @property
    def is_gathered(self) -> bool:
        """Whether the host gathers its rows, or computes from it what it gathers; see `LAYER_INPUTS`."""
        return self.role == "layer_inputs"


def part_name(name: str, head: int | None = None, tap: int | None = None) -> str:
    """The name of a head's part of a bias, or of one tap of the kernels of a convolution; or of the whole tensor."""
    if tap is not None:
        return f"{name}.t{tap}"
    return name if head is None else f"{name}.h{head}"


def by_inputs(matrix: NDArray[Any]) -> NDArray[Any]:
    """A matrix `[out, in]`, as checkpoints store it, as `[in, out]`, as graphs multiply by it and `quant` rounds it."""
    return matrix.T


def by_outputs(matrix: NDArray[Any]) -> NDArray[Any]:
    """A matrix `[in, out]` as `[out, in]`, the inverse of `by_inputs`."""
    return matrix.T


def views(spec: DecoderSpec) -> Iterator[View]:
    """Every tensor that the decoder reads, in reading order, under the names of its checkpoints."""
    for view in _views(spec):
        yield replace(view, key=stored_name(spec, view.key)) if spec.stored_names else view


def _views(spec: DecoderSpec) -> Iterator[View]:
    table, norm = (spec.vocab, spec.hidden), FINAL_NORM
    yield View(EMBEDDING, table, EMBEDDING, spec.vocab, "embedding", gain=spec.embedding_gain)
    if spec.layer_inputs:
        width = spec.layers * spec.layer_inputs
        shapes: dict[str, tuple[int, ...]] = {
            LAYER_TABLE: (spec.vocab, width),
            LAYER_TABLE_PROJECTION: (width, spec.hidden),
            LAYER_TABLE_NORM: (spec.layer_inputs,),
        }
        for name, shape in shapes.items():
            if spec.layer_table or name != LAYER_TABLE:
                yield View(name, shape, name, shape[0], "layer_inputs")
    target = spec.target
    if target is not None:
        if target.is_cached_apart:
            frame = (target.hidden, target.hidden)
            yield View(EMBEDDING_IN, (spec.hidden, spec.hidden), EMBEDDING_IN, spec.hidden, "embedding_in")
            yield View(TARGET_FRAME, frame, TARGET_FRAME, target.hidden, "target_frame")
        yield View(TARGET_IN, (spec.hidden, target.hidden), TARGET_IN, spec.hidden, "target_in")
    for layer in spec.own_layers:
        yield from _layer(spec, layer)
    last = View(norm, (spec.hidden,), norm, spec.hidden, "norm", offset=spec.norm_offset)
    yield replace(last, is_stored=spec.norm_weights)
    if spec.norm_biases:
        yield _norm_bias(spec, norm, None)
    if target is not None:
        yield View(TARGET_OUT, (target.hidden, spec.hidden), TARGET_OUT, target.hidden, "target_out")
    if spec.vocabulary == "turned":
        yield View(HEAD_TURN, (spec.hidden, spec.hidden), HEAD_TURN, spec.hidden, "turn")
    if spec.shares_vocabulary:
        yield View(HEAD, table, EMBEDDING, spec.vocab, "head", gain=spec.embedding_gain)
    else:
        key = EMBEDDING if spec.tied_head else HEAD
        width = spec.result_width
        yield View(HEAD, (width, spec.hidden), key, width, "head", norm=norm, gain=spec.logits_gain)
    if "lm_head" in spec.biased:
        width = spec.result_width
        yield _bias(spec, View(HEAD_BIAS, (width,), HEAD_BIAS, width, "head", gain=spec.logits_gain), norm)


def stored_name(spec: DecoderSpec, name: str) -> str:
    """The name that checkpoints of the architecture have for a tensor."""
    for ours, theirs in spec.stored_names:
        name = name.replace(ours, theirs)
    return name


def table_key(spec: DecoderSpec) -> str:
    """The name of the matrix whose rows are the embeddings."""
    return HEAD if spec.shares_vocabulary else EMBEDDING


def attention_norm(layer: int) -> str:
    """Name of the norm in front of attention, if there is one."""
    return f"model.layers.{layer}.input_layernorm.weight"


def convolution_kernel(layer: int) -> str:
    """Name of the kernels `[H, 1, K]` of a layer with a short convolution."""
    return f"model.layers.{layer}.conv.conv.weight"


def delta_kernel(layer: int) -> str:
    """Name of the kernels `[channels, 1, K]` of a layer with a gated delta rule."""
    return f"model.layers.{layer}.linear_attn.conv1d.weight"


def delta_kernel_bias(layer: int) -> str:
    """Name of the bias `[channels]` of such a convolution, if it has one."""
    return f"model.layers.{layer}.linear_attn.conv1d.bias"


def delta_rates(layer: int) -> str:
    """Name of the rates of decay, one for each value head of a layer with a gated delta rule."""
    return f"model.layers.{layer}.{DELTA_RATES}"


def delta_spans(layer: int) -> str:
    """Name of their inverses, the tokens after which 1/e is left at a step of 1, with a sign; of each channel."""
    return f"model.layers.{layer}.linear_attn.A_inverse"


def delta_skips(layer: int) -> str:
    """Name of D of Mamba-2, what values are multiplied by and added to the results; of each channel."""
    return f"model.layers.{layer}.linear_attn.D"


def delta_inputs(rule: DeltaRule) -> tuple[str, ...]:
    """The projections of the input of a gated delta rule, or those of Mamba-2 in the order of its stored matrix."""
    return DELTA_INPUTS if rule.corrects else (DELTA_INPUTS[1], DELTA_INPUTS[0], DELTA_INPUTS[3])


def layer_scalar(layer: int) -> str:
    """Name of the number `[1]` that the residual is multiplied by at the end of a layer."""
    return f"model.layers.{layer}.layer_scalar"


def xielu_numbers(layer: int) -> tuple[str, str]:
    """Names of what xIELU multiplies the square of an x above 0 by, and `exp(x) - 1 - x` of one below, `[1]` each."""
    return f"model.layers.{layer}.mlp.act_fn.alpha_p", f"model.layers.{layer}.mlp.act_fn.alpha_n"


def router(layer: int) -> str:
    """Name of the matrix `[E, H]` that scores the experts of a layer."""
    return f"model.layers.{layer}.mlp.router.weight"


def expert_scores(layer: int) -> str:
    """Name of what is added to the scores that choose experts, `[E]`."""
    return f"model.layers.{layer}.mlp.router.correction"


def expert_projection(expert: int, projection: str) -> str:
    """The projection `gate_proj`, `up_proj` or `down_proj` of an expert, as its name in a layer."""
    return f"mlp.experts.{expert}.{projection}"


def expert_of(name: str) -> int | None:
    """The expert that a matrix belongs to, by its name; None for another."""
    _, is_one, rest = name.partition(".mlp.experts.")
    return int(rest.split(".")[0]) if is_one else None


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to, by its name; None outside of the layers."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else None


def head_width(spec: DecoderSpec, name: str) -> int:
    """D of the heads of a projection, by its name."""
    layer = layer_of(name)
    return spec.head_dim if layer is None else spec.of_layer(layer).head_dim


def feed_forward_norm(spec: DecoderSpec, layer: int) -> str:
    """Name of the norm in front of the feed-forward, if there is one; it may be that in front of attention."""
    if spec.parallel == "one-norm":
        return attention_norm(layer)
    norm = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
    return f"model.layers.{layer}.{norm}.weight"


def _layer(spec: DecoderSpec, layer: int) -> Iterator[View]:
    hidden, inner = spec.hidden, spec.of_layer(layer).intermediate
    for name in _norms(spec, layer):
        of_residual = _norm(spec, layer, name, hidden, "norm", gain=_post_gain(spec, name))
        yield of_residual
        if spec.norm_biases:
            yield _norm_bias(spec, of_residual.name, layer)
    mixers = {"attention": _attention, "convolution": _convolution, "delta_rule": _delta_rule}
    for kind in spec.mixers(layer):
        yield from mixers[kind](spec, layer)
    if not spec.has_feed_forward(layer):
        return
    if spec.experts is not None and spec.has_experts(layer):
        yield from _experts(spec, spec.experts, layer)
        return
    gates = {"mlp.gate_proj": inner, "mlp.up_proj": inner} if spec.gated else {"mlp.up_proj": inner}
    fused = "mlp.gate_up_proj" if "mlp" in spec.fused else None
    norm = feed_forward_norm(spec, layer) if spec.pre_norms else None
    yield from _projections(spec, layer, gates, hidden, fused, norm=norm)
    if spec.activation == "xielu":
        for name, offset in zip(xielu_numbers(layer), (0.0, XIELU_BETA), strict=True):
            yield View(name, (1,), name, 1, "activation", layer, offset=offset, stored_as="softplus")
    yield from _projections(spec, layer, {"mlp.down_proj": hidden}, inner, gain=_branch_gain(spec))
    if spec.layer_inputs:
        yield from _projections(spec, layer, {"per_layer_input_gate": spec.layer_inputs}, hidden)
        yield from _projections(spec, layer, {"per_layer_projection": hidden}, spec.layer_inputs)
        yield _norm(spec, layer, "post_per_layer_input_norm", hidden, "norm")
    if spec.layer_scalars:
        name = layer_scalar(layer)
        yield View(name, (1,), name, 1, "layer_scalar", layer)


def _experts(spec: DecoderSpec, experts: Experts, layer: int) -> Iterator[View]:
    """The router, and gate, up and down of each expert, which may be parts of one tensor of all."""
    hidden, inner, prefix = spec.hidden, experts.intermediate, f"model.layers.{layer}."
    norm = feed_forward_norm(spec, layer) if spec.pre_norms else None
    yield from _projections(spec, layer, {"mlp.router": experts.count}, hidden, norm=norm)
    if experts.corrected:
        name = expert_scores(layer)
        yield View(name, (experts.count,), name, experts.count, "expert_score", layer)
    gate_up, down = f"{prefix}mlp.experts.gate_up_proj", f"{prefix}mlp.experts.down_proj"
    for expert in range(experts.count):
        of_gate, of_up, of_down = (
            f"{prefix}{expert_projection(expert, projection)}.weight"
            for projection in ("gate_proj", "up_proj", "down_proj")
        )
        read = View(of_gate, (inner, hidden), of_gate, inner, "expert_gate", layer, norm)
        written = View(of_down, (hidden, inner), of_down, hidden, "expert_down", layer)
        written = replace(written, gain=experts.gain * _branch_gain(spec))
        reads = [read, replace(read, name=of_up, key=of_up, role="expert_up")]
        if "experts" in spec.fused:
            rows, first = 2 * experts.count * inner, 2 * expert * inner
            reads = [replace(view, key=gate_up, rows=rows, stacked=experts.count) for view in reads]
            reads = [replace(view, first=at) for view, at in zip(reads, (first, first + inner), strict=True)]
            rows = experts.count * hidden
            written = replace(written, key=down, rows=rows, first=expert * hidden, stacked=experts.count)
        yield from (*reads, written)


def _attention(spec: DecoderSpec, layer: int) -> Iterator[View]:
    sizes, hidden, owns = spec.of_layer(layer), spec.hidden, spec.owns_cache(layer)
    query, key_value = spec.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    if (qk_norm := spec.qk_norm_of(layer)) is not None:
        whole, is_stored = qk_norm == "all-heads", spec.norm_weights and spec.qk_norm_weights
        of_queries = _norm(spec, layer, "self_attn.q_norm", query if whole else sizes.head_dim, "q_norm")
        of_keys = _norm(spec, layer, "self_attn.k_norm", key_value if whole else sizes.head_dim, "k_norm")
        for view in (of_queries, of_keys) if owns else (of_queries,):
            yield replace(view, pairs=_pairs(spec, layer), is_stored=is_stored)
    qkv = "self_attn.qkv_proj"
    fused = qkv if "attention" in spec.fused else None
    attention = {"self_attn.q_proj": query}
    if owns:
        attention |= {"self_attn.k_proj": key_value, "self_attn.v_proj": key_value}
    norm = attention_norm(layer) if spec.pre_norms else None
    for view in _projections(spec, layer, attention, hidden, fused, norm=norm):
        if view.role in ("q", "k"):
            view = replace(view, pairs=_pairs(spec, layer))
        if "heads" in spec.fused and view.key == view.name:
            key, dim = view.key.replace(f"self_attn.{view.role}_proj", qkv), sizes.head_dim
            first = "qkv".index(view.role) * dim
            view = replace(view, key=key, rows=3 * query, first=first, blocks=(dim, 3 * dim))
        if spec.output_gates and view.role == "q":
            both = replace(view, rows=2 * query, blocks=(spec.head_dim, 2 * spec.head_dim))
            gates = view.name.replace("q_proj", "g_proj")
            yield both
            yield replace(both, name=gates, role="head_gate", first=spec.head_dim)
        else:
            yield view
    if spec.head_gates:
        yield from _projections(spec, layer, {"self_attn.g_proj": spec.heads}, hidden, norm=norm)
    yield from _projections(spec, layer, {"self_attn.o_proj": hidden}, query, gain=_branch_gain(spec))


def _pairs(spec: DecoderSpec, layer: int) -> tuple[Pairs, int, int] | None:
    """See `View.pairs`."""
    rope = spec.rope_of(layer)
    if rope is None or spec.pairs == "halves":
        return None
    return spec.pairs, rope.width, spec.of_layer(layer).head_dim


def _convolution(spec: DecoderSpec, layer: int) -> Iterator[View]:
    """Three projections of the input, stored as one matrix, the kernel of each channel `[H, 1, K]`, and out_proj."""
    assert spec.convolution is not None, "the layer has one"
    hidden, norm = spec.hidden, attention_norm(layer) if spec.pre_norms else None
    inputs = dict.fromkeys(CONVOLUTION_INPUTS, hidden)
    yield from _projections(spec, layer, inputs, hidden, "conv.in_proj", norm=norm)
    name = convolution_kernel(layer)
    yield View(name, (hidden, 1, spec.convolution.kernel), name, hidden, "kernel", layer)
    yield from _projections(spec, layer, {"conv.out_proj": hidden}, hidden, gain=_branch_gain(spec))


def _delta_rule(spec: DecoderSpec, layer: int) -> Iterator[View]:
    """The projections of the input, the kernels `[channels, 1, K]`, and for each head a bias and a rate of decay.

    Mamba-2 stores its projections as one matrix, and has norm weights of all heads.
    """
    rule = spec.delta_rule
    assert rule is not None, "the layer has one"
    hidden, norm, prefix = spec.hidden, attention_norm(layer) if spec.pre_norms else None, f"model.layers.{layer}."
    heads = rule.value_heads
    widths = dict(zip(DELTA_INPUTS, (rule.channels, rule.values, heads, heads), strict=True))
    fused = None if rule.corrects else "linear_attn.in_proj"
    yield from _projections(spec, layer, {name: widths[name] for name in delta_inputs(rule)}, hidden, fused, norm=norm)
    name = delta_kernel(layer)
    kernels = View(name, (rule.channels, 1, rule.kernel), name, rule.channels, "kernel", layer)
    yield kernels if rule.corrects else replace(kernels, row_gains=_channel_gains(spec, rule))
    if rule.kernel_bias:
        name = delta_kernel_bias(layer)
        yield View(name, (rule.channels,), name, rule.channels, "kernel_bias", layer)
    bias = prefix + "linear_attn.in_proj_a.bias"
    yield View(bias, (heads,), prefix + "linear_attn.dt_bias", heads, "delta_a", layer)
    rates = delta_rates(layer)
    yield View(rates, (heads,), rates, heads, "delta_rate", layer, stored_as="log")
    if not rule.corrects:
        of_channels = View(delta_skips(layer), (rule.values,), delta_skips(layer), heads, "delta_scale", layer)
        of_channels = replace(of_channels, repeats=rule.value_dim)
        yield of_channels
        yield replace(of_channels, name=delta_spans(layer), key=rates, stored_as="inverse-log")
    if rule.norm is not None:
        gated, width = f"{prefix}linear_attn.norm.weight", rule.value_dim if rule.corrects else rule.values
        yield View(gated, (width,), gated, width, "delta_norm", layer)
    yield from _projections(spec, layer, {"linear_attn.out_proj": hidden}, rule.values, gain=_branch_gain(spec))


def norms_of_residual(spec: DecoderSpec) -> set[str]:
    """Names of the norms that read the residual, with the copies of its split channels."""
    return {FINAL_NORM, *(view.norm for view in views(spec) if view.norm is not None)}


def _norms(spec: DecoderSpec, layer: int) -> tuple[str, ...]:
    """The norms of the residual and of the outputs added to it, by Hugging Face's names.

    `post_attention_layernorm` normalizes the output of attention if there are post-norms, else the input of the
    feed-forward.
    """
    if spec.parallel == "one-norm":
        return ("input_layernorm",)
    if not spec.post_norms:
        of_mixer = ("input_layernorm",) if spec.mixers(layer) else ()
        return (*of_mixer, "post_attention_layernorm") if spec.has_feed_forward(layer) else of_mixer
    if not spec.pre_norms:
        return _POST_NORMS
    return ("input_layernorm", _POST_NORMS[0], "pre_feedforward_layernorm", _POST_NORMS[1])


_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


def _post_gain(spec: DecoderSpec, norm: str) -> float:
    """What multiplies the weights of a norm: of one behind a block, the gain of what is added to the residual."""
    return spec.residual_gain if spec.post_norms and norm in _POST_NORMS else 1.0


def _branch_gain(spec: DecoderSpec) -> float:
    """What multiplies a matrix that writes to the residual: a norm behind it would undo the gain."""
    return 1.0 if spec.post_norms else spec.residual_gain


def _norm(spec: DecoderSpec, layer: int, part: str, width: int, role: TensorRole, *, gain: float = 1.0) -> View:
    name = f"model.layers.{layer}.{part}.weight"
    view = View(name, (width,), name, width, role, layer, offset=spec.norm_offset, gain=gain)
    return view if spec.norm_weights else replace(view, is_stored=False)


def _projections(
    spec: DecoderSpec,
    layer: int,
    widths: dict[str, int],
    width_in: int,
    fused: str | None = None,
    *,
    norm: str | None = None,
    gain: float = 1.0,
) -> Iterator[View]:
    """Matrices `[out, in]` and biases `[out]` of projections by their output widths; `fused` stores them as one."""
    prefix, total, first = f"model.layers.{layer}.", sum(widths.values()), 0
    for part, width in widths.items():
        stored, rows = (fused, total) if fused else (part, width)
        shapes: dict[str, tuple[int, ...]] = {"weight": (width, width_in)}
        if part in spec.biased:
            shapes["bias"] = (width,)
        for kind, shape in shapes.items():
            read = norm if kind == "weight" else None
            name, key = f"{prefix}{part}.{kind}", f"{prefix}{stored}.{kind}"
            view = View(name, shape, key, rows, _ROLES[part], layer, read, first, gain=gain * spec.gain_of(part))
            yield _bias(spec, view, norm) if kind == "bias" else view
        first += width if fused else 0


def _norm_bias(spec: DecoderSpec, norm: str, layer: int | None) -> View:
    name = norm.replace(".weight", ".bias")
    return View(name, (spec.hidden,), name, spec.hidden, "norm_bias", layer)


def _bias(spec: DecoderSpec, view: View, norm: str | None) -> View:
    """The bias of a projection, with that of the norm which it reads."""
    if norm is None or not spec.norm_biases:
        return view
    of_norm = norm.replace(".weight", ".bias")
    if not any(f".{projection}." in f".{view.name}" for projection in spec.made_biases):
        return replace(view, norm_bias=of_norm)
    return replace(view, norm_bias=of_norm, key=of_norm, rows=spec.hidden, first=0)


def _channel_gains(spec: DecoderSpec, rule: DeltaRule) -> tuple[tuple[int, float], ...]:
    """What multiplies the channels that a convolution in front of Mamba-2 reads, by parts; empty if nothing does.

    It is linear, so that its kernels can have them.
    """
    parts = (("linear_attn.values", rule.values), ("linear_attn.keys", rule.keys), ("linear_attn.queries", rule.keys))
    gains = tuple((width, spec.gain_of(name)) for name, width in parts)
    return gains if any(gain != 1.0 for _, gain in gains) else ()


def matrices(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """`[out, in]` of every matrix that is multiplied with activations, by name."""
    return {v.name: (v.shape[0], v.shape[1]) for v in views(spec) if v.is_multiplied}


_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.", ""),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("backbone.", "model."),
)
FURTHER_TOKENS = "mtp."
"""Start of the names of layers that predict further tokens, in a checkpoint of text or around it."""
_OTHERS = (
    "visual.",
    FURTHER_TOKENS,
    "vision_tower.",
    "vision_model.",
    "connector.",
    "multi_modal_projector.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
)


_SPELLINGS = ((".self_attn.gate_proj.", ".self_attn.g_proj."),)
"""How transformers writes names into files where its classes have others; it reads both."""


def decoder_tensor(stored: str) -> str:
    """The name that a tensor of a decoder has in a checkpoint of its text model alone.

    Args:
        stored: its name, which may be that of a multimodal checkpoint in the older form
            (`language_model.model.layers...`) or the newer one (`model.language_model.layers...`).
    """
    for written, name in _SPELLINGS:
        stored = stored.replace(written, name)
    for prefix, plain in _PREFIXES:
        if stored.startswith(prefix):
            return plain + stored.removeprefix(prefix)
    return stored


def text_tensor(stored: str) -> str | None:
    """As `decoder_tensor`; None for a tensor of a vision or audio model, or of layers that predict further tokens."""
    return decoder_tensor(stored) if encoder_tensor(stored) is None else None


def encoder_tensor(stored: str) -> str | None:
    """The name of a tensor that is none of the decoder's, in the newer form (`model.vision_tower...`), or None."""
    name = stored.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
    return f"model.{name}" if name.startswith(_OTHERS) else None
