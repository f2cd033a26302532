"""The decoder, written once over the operations of `Ops`: numpy, or a builder of graphs for one runtime.

Each query head has its own matrices, and reads the keys and values of its group; a cache tensor belongs to one key or
value head. The queries of a group are operands of their own, or the rows of one. Every result has a name, under which
ranges are observed and encodings are found. Results that must keep one encoding through slices and joins share a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, TypeVar

from edgekv.kv import KvTensor
from edgekv.spec import (
    CONVOLUTION_INPUTS,
    EMBEDDING_IN,
    FINAL_NORM,
    FINAL_NORM_RESULT,
    HEAD,
    HEAD_BIAS,
    HEAD_TURN,
    TARGET_FRAME,
    TARGET_IN,
    TARGET_OUT,
    TARGET_OUT_RESULT,
    XIELU_BETA,
    DecoderSpec,
    GraphRecord,
    LoraTarget,
    Mixer,
    PartRecord,
    attention_norm,
    convolution_kernel,
    expert_projection,
    expert_scores,
    feed_forward_norm,
    layer_scalar,
    router,
    xielu_numbers,
)

V = TypeVar("V")

SHARES_EPS = 1e-6
"""See `Ops.shares`."""

_TARGETS: dict[str, LoraTarget] = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "conv.b_proj": "conv_b",
    "conv.c_proj": "conv_c",
    "conv.x_proj": "conv_x",
    "conv.out_proj": "conv_out",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}

_MIXER_OUTPUTS: dict[Mixer, tuple[str, str]] = {
    "attention": ("self_attn.o_proj", "o"),
    "convolution": ("conv.out_proj", "conv.out"),
    "delta_rule": ("linear_attn.out_proj", "delta.out"),
}
"""The projection back to the residual, and the name of its result."""


class BlockOps(Protocol[V]):
    """What decoders and encoders have in common. Activations are `[1, 1, rows, width]`; joins are along width."""

    def linear(
        self, x: V, weight: str, name: str, *, bias: str | None = None, head: int | None = None, gain: float = 1.0
    ) -> V:
        """`(x @ weight.T + bias) * gain`; with `head`, only the output channels of that head (head_dim wide)."""

    def normalize(self, x: V, width: int, name: str) -> V:
        """`x / rms(x)` over the width."""

    def add(self, a: V, b: V, name: str) -> V: ...

    def multiply(self, a: V, b: V, name: str) -> V: ...

    def swap_halves(self, x: V, half: int) -> V:
        """The second half of the width, then the first, in the encoding of `x`."""

    def gelu(self, x: V, name: str) -> V:
        """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`, what PyTorch calls GELU with approximate=tanh."""

    def exact_gelu(self, x: V, name: str) -> V:
        """`x / 2 * (1 + erf(x / sqrt(2)))`."""

    def sigmoid(self, x: V, name: str) -> V: ...

    def silu(self, x: V, at: str) -> V:
        """`x * sigmoid(x)`; a runtime may have an operation of its own for it."""
        return self.multiply(x, self.sigmoid(x, at + "sigmoid"), at + "silu")

    def join(self, parts: list[V], name: str) -> V:
        """Concatenated; the parts and the result have the encoding of `name`."""

    def scores(self, query: V, keys: V, name: str) -> V:
        """`query @ keys.T`, `[1, 1, AR, S]`."""

    def softmax(self, x: V, name: str) -> V: ...

    def attend(self, weights: V, values: V, name: str) -> V:
        """`weights @ values`, `[1, 1, AR, D]`."""


class Ops(BlockOps[V], Protocol[V]):
    """The operations of a decoder. Activations are `[1, 1, AR, width]`; slices are along width."""

    def adapt(self, y: V, x: V, layer: int, target: LoraTarget, name: str, *, head: int | None = None) -> V:
        """`y`, the result of a projection of x, plus what the bound adapter adds to it, if graphs have slots."""

    def rms_norm(self, x: V, weight: str, name: str, *, gain: float = 1.0) -> V:
        """`x / rms(x) * weight * gain`, over the width."""

    def subtract(self, a: V, b: V, name: str) -> V: ...

    def scale(self, x: V, factor: float, name: str) -> V:
        """`x * factor`, a constant above 0."""

    def scale_by(self, x: V, weight: str, name: str) -> V:
        """`x * weight`, a stored number, or one of each channel."""

    def shift_by(self, x: V, weight: str, name: str) -> V:
        """`x + weight`, a stored number for each channel."""

    def chosen(self, x: V, count: int, name: str) -> V:
        """1 for the `count` largest elements of a row, of equal ones the first, and 0 for the others."""

    def shares(self, x: V, name: str) -> V:
        """`x / (sum(x) + 1e-6)` over the width, of elements from 0 to 1."""

    def tanh(self, x: V, name: str) -> V: ...

    def relu(self, x: V, name: str) -> V:
        """`max(x, 0)`."""

    def exp(self, x: V, name: str) -> V:
        """`exp(x)` of an x that is at most 0."""

    def complement(self, x: V, of: float, name: str) -> V:
        """`of - x`."""

    def sqrt(self, x: V, name: str) -> V: ...

    def sign(self, x: V, name: str) -> V: ...

    def split(self, x: V, widths: Sequence[int]) -> list[V]:
        """Adjacent slices over the whole width, in the encoding of `x`."""

    def slice(self, x: V, first: int, width: int) -> V:
        """A slice of the width, in the encoding of `x`."""

    def rotation(self, layer: int, heads: int) -> tuple[V, V]:
        """Cosines and sines of the layer's rotary embedding for both elements of each pair, `[1, 1, heads * AR, R]`.

        The sines of first elements, the first half, are negative ones.
        """

    def layer_input(self, layer: int) -> V:
        """What the host has gathered for a layer, `[1, 1, AR, P]`; rows of pictures are as wide as the residual."""

    def append_to_cache(self, new: V, tensor: KvTensor) -> V:
        """Past and new rows `[1, 1, S, D]` of one cache tensor, in the cache's encoding."""

    def cached(self, tensor: KvTensor) -> V:
        """Past and new rows of a tensor that an earlier layer has appended to, as `append_to_cache` returned them."""

    def tap(self, rows: V, weight: str, tap: int, name: str) -> V:
        """One of the K products of a causal convolution with a kernel for each channel, `[1, 1, AR, H]`.

        Args:
            rows: past and new, `[1, 1, K-1+AR, H]`, as `append_to_cache` returns them.
            weight: name of the kernels `[H, 1, K]`.
            tap: 0 to K-1: for each new token, the row K-1-tap tokens before it, times that element of each kernel.
            name: of the result.
        """

    def masked(self, scores: V, layer: int, name: str) -> V:
        """The scores plus the layer's attention mask: causal, and within `spec.window(layer)` tokens."""

    def delta_rule(self, spec: DecoderSpec, layer: int, x: V) -> V:
        """All heads' outputs of a gated delta rule or Mamba-2, `[1, 1, AR, values]`; see `edgekv.graphs.delta_rule`."""

    # What a runtime may not have.

    def target_hidden(self) -> V:
        """The last hidden state of the model that a drafter drafts for, `[1, 1, AR, H]`."""
        raise ValueError("target_hidden: got a drafter; expected a model of its own")

    def give_hidden(self, x: V) -> None:
        """Give a hidden state beside the logits, as `last_hidden`."""
        raise ValueError("give_hidden: got a model with two outputs; expected logits alone")

    def side_by_side(self, parts: list[V]) -> V:
        """Concatenated, each in an encoding of its own."""
        raise ValueError("side_by_side: got a graph; expected floats, which have no encodings")

    # What a runtime may have an operation of its own for.

    def read_on(self, x: V, layer: int) -> V:
        """The rows of x that something reads behind the mixers of a layer."""
        return x

    def mixture(self, spec: DecoderSpec, layer: int, x: V) -> V:
        """The weighted sum of a layer's experts, `[1, 1, AR, H]`."""
        return expert_sum(self, spec, layer, expert_inners(self, spec, layer, x))

    def heads_of(self, x: V, count: int) -> list[V]:
        """The elements of x, one for each head, each `[1, 1, AR, 1]`, in the encoding of `x`."""
        return self.split(x, [1] * count)

    def fold_heads(self, heads: list[V], names: Sequence[str] = ()) -> list[V]:
        """Heads of one group, `[1, 1, AR, width]`, as they are; or all as the rows of one, `[1, 1, G * AR, width]`.

        Args:
            heads: with equal encodings.
            names: beginnings of the names of each head's results from its projection on, whose encodings are chosen
                equal for all heads; those of rows have the first name. None if they are equal anyway.
        """
        return heads

    def unfold_heads(self, folded: list[V], heads: int) -> list[V]:
        """What `fold_heads` made of so many heads, as parts that are joined along the width."""
        return folded

    def rotate(self, spec: DecoderSpec, layer: int, x: V, name: str, heads: int = 1) -> V:
        """The layer's rotary embedding of a head, or of several as rows, in Llama's half-split form.

        Of the R elements that are rotated, pairs are (i, i + R/2).
        """
        rope = spec.rope_of(layer)
        if rope is None:
            return x
        width = 2 * (rope.width // 2)
        rest = spec.of_layer(layer).head_dim - width
        rotated = name if rest else name + ".rotated"  # the rest is concatenated in its own encoding
        cos, sin = self.rotation(layer, heads)
        first, *still = self.split(x, [width, rest]) if rest else [x]
        swapped = self.swap_halves(first, width // 2)
        products = self.multiply(first, cos, name + ".cos"), self.multiply(swapped, sin, name + ".sin")
        turned = self.add(*products, rotated)
        return self.join([turned, *still], rotated) if still else turned


class GraphOps(Ops[V], Protocol[V]):
    """The operations of a graph, which computes logits of some of its rows."""

    def select(self, x: V) -> V:
        """The row of the token whose logits are wanted."""


FOLDED_AR = 4
"""With more tokens per inference, the heads of a group are faster as operands of their own."""


def folds_heads(graph: GraphRecord, spec: DecoderSpec) -> bool:
    """Whether a graph multiplies all query heads of a group at once, as the rows of one operand; see `fold_heads`."""
    return graph.ar <= FOLDED_AR


def drafter_input(ops: Ops[V], spec: DecoderSpec, embedding: V) -> V:
    """The hidden state before the first layer: of a drafter, embedding and projected state of its target."""
    if spec.target is None:
        return embedding
    state = ops.target_hidden()
    if spec.target.is_cached_apart:
        embedding = ops.linear(embedding_inputs(ops, spec, embedding), EMBEDDING_IN, "embedding_in")
        state = target_inputs(ops, spec, state)
    return ops.add(embedding, ops.linear(state, TARGET_IN, "target_in"), "drafter_input")


def embedding_inputs(ops: Ops[V], spec: DecoderSpec, embedding: V) -> V:
    """The input of the projection of embeddings, in a drafter with a cache of its own."""
    return ops.normalize(embedding, spec.hidden, "embedding_norm")


def target_inputs(ops: Ops[V], spec: DecoderSpec, state: V) -> V:
    """The input of the projection of the target's hidden states, in a drafter with a cache of its own."""
    return ops.normalize(ops.linear(state, TARGET_FRAME, "target_frame"), spec.hidden, "target_norm")


def decoder_layer(ops: Ops[V], spec: DecoderSpec, layer: int, hidden: V) -> V:
    """One layer: a mixer of tokens (attention or what replaces it) and a feed-forward, each added to the residual.

    Some have one of both alone, some two mixers that read the same input.
    The feed-forward reads the residual behind the mixer, or, with `spec.parallel`, the one that the mixer reads.
    `spec.pre_norms` normalizes their inputs (Llama), `spec.post_norms` their outputs (OLMo 2), both do either (Gemma).
    With post-norms, Hugging Face's `post_attention_layernorm` normalizes the output of attention; without, it
    normalizes the input of the feed-forward. The functions below are the parts of a layer: each begins with the
    matrices that read one input, or with that input.
    """
    x = mixer_inputs(ops, spec, layer, hidden)
    mixed = [ops.read_on(rows, layer) for rows in _mixed(ops, spec, layer, x)]
    before = ops.read_on(hidden, layer)
    hidden = _add_mixers(ops, spec, layer, before, mixed)
    if not spec.has_feed_forward(layer):
        return hidden
    if spec.parallel == "one-norm":
        x = ops.read_on(x, layer)
    else:
        x = feed_forward_inputs(ops, spec, layer, before if spec.parallel else hidden)
    if spec.has_experts(layer):
        return ops.add(hidden, ops.mixture(spec, layer, x), layer_result(spec, layer))
    hidden = add_feed_forward(ops, spec, layer, hidden, feed_forward(ops, spec, layer, x))
    if not spec.layer_inputs:
        return hidden
    return add_layer_input(ops, spec, layer, hidden, gated_layer_input(ops, spec, layer, hidden))


def route_layer(ops: Ops[V], spec: DecoderSpec, layer: int, hidden: V) -> tuple[V, V, V]:
    """A layer up to its router: the residual behind the mixer, the input of the experts, and the weights of all."""
    mixed = _mixed(ops, spec, layer, mixer_inputs(ops, spec, layer, hidden))
    behind = _add_mixers(ops, spec, layer, hidden, mixed)
    x = feed_forward_inputs(ops, spec, layer, hidden if spec.parallel else behind)
    return behind, x, routed(ops, spec, layer, x)[0]


def layer_result(spec: DecoderSpec, layer: int) -> str:
    """Name of the residual after a layer."""
    last = "mlp_add" if spec.has_feed_forward(layer) else "attention_add"
    last = "layer_input_add" if spec.layer_inputs else "picture_add" if layer < spec.picture_layers else last
    return f"layers.{layer}." + ("scaled" if spec.layer_scalars else last)


def mixer_inputs(ops: Ops[V], spec: DecoderSpec, layer: int, hidden: V) -> V:
    """The input of the projections of queries, keys and values, or of those of a convolution or a delta rule.

    The residual if the layer has none of them.
    """
    if not spec.pre_norms or not spec.mixers(layer):
        return hidden
    return _residual_norm(ops, spec, hidden, attention_norm(layer), f"layers.{layer}.attention_norm")


def mixer(ops: Ops[V], spec: DecoderSpec, layer: int, x: V) -> V:
    """The input of the projection back to the residual: o_proj, or out_proj of a convolution or a delta rule.

    Of two mixers both inputs, joined; x if there is none.
    """
    mixed = _mixed(ops, spec, layer, x)
    return ops.side_by_side(mixed) if len(mixed) > 1 else mixed[0] if mixed else x


def _mixed(ops: Ops[V], spec: DecoderSpec, layer: int, x: V) -> list[V]:
    """The inputs of the projections back to the residual, in the order of `spec.mixers`."""
    mixed = []
    for kind in spec.mixers(layer):
        if kind == "delta_rule":
            mixed.append(ops.delta_rule(spec, layer, x))
        else:
            mixed.append((convolution if kind == "convolution" else attention)(ops, spec, layer, x))
    return mixed


def convolution(ops: Ops[V], spec: DecoderSpec, layer: int, x: V) -> V:
    """A gated short convolution: `c * conv(b * x)`; its state is the last K-1 rows of `b * x`."""
    assert spec.convolution is not None, "the layer has one"
    at = f"layers.{layer}.conv."
    before, after, filtered = (
        _linear(ops, spec, x, layer, projection, f"{at}{projection[5]}") for projection in CONVOLUTION_INPUTS
    )
    gated, tensor = ops.multiply(before, filtered, at + "gated"), KvTensor(layer, "conv", 0)
    if spec.convolution.stores_roots:
        # Not Abs: onnxruntime-qnn 2.7.0 rounds it in another way for one row than for several.
        sign = ops.sign(gated, at + "sign")
        root = ops.sqrt(ops.multiply(gated, sign, at + "magnitude"), at + "root")
        stored = ops.append_to_cache(ops.multiply(root, sign, at + "signed_root"), tensor)
        magnitude = ops.multiply(stored, ops.sign(stored, at + "stored.sign"), at + "stored.magnitude")
        rows = ops.multiply(stored, magnitude, at + "stored.squares")
    else:
        rows = ops.append_to_cache(gated, tensor)
    total, *products = (
        ops.tap(rows, convolution_kernel(layer), tap, f"{at}tap{tap}") for tap in range(spec.convolution.kernel)
    )
    for tap, product in enumerate(products, 1):
        total = ops.add(total, product, f"{at}sum{tap}")
    return ops.multiply(after, total, at + "output")


def attention(ops: Ops[V], spec: DecoderSpec, layer: int, x: V) -> V:
    """The concatenated outputs of all heads."""
    at, outputs, group = f"layers.{layer}.", [], spec.group(layer)
    gates = _head_gates(ops, spec, x, layer)
    cached = _cached_heads(ops, spec, x, layer)
    new_queries = _projected_heads(ops, spec, x, layer, "q", spec.heads)
    for kv, (keys, values) in enumerate(cached):
        heads = range(kv * group, (kv + 1) * group)
        names, outputs_of_group = [f"{at}q.h{head}" for head in heads], []
        folded = ops.fold_heads([next(new_queries) for _ in heads], names)
        for name, projected in zip(names, folded, strict=False):
            query = _rotated_head(ops, spec, layer, "q", projected, name, group // len(folded))
            scores = _scores(ops, spec, layer, query, keys, kv)
            probabilities = ops.softmax(ops.masked(scores, layer, f"{at}masked.g{kv}"), "probabilities")
            outputs_of_group.append(ops.attend(probabilities, values, at + "attention"))
        unfolded = ops.unfold_heads(outputs_of_group, group)
        if gates:
            # Heads as rows times their gates would be rounded in another way on the HTP than each head alone.
            width = spec.of_layer(layer).head_dim
            apart = unfolded if len(unfolded) == group else ops.split(unfolded[0], [width] * group)
            pairs = zip(apart, heads, strict=True)
            unfolded = [ops.multiply(attended, gates[head], at + "gated") for attended, head in pairs]
        outputs += unfolded
    joined = ops.join(outputs, at + ("gated" if gates else "attention"))
    return ops.multiply(joined, _output_gates(ops, spec, x, layer), at + "gated") if spec.output_gates else joined


def _cached_heads(ops: Ops[V], spec: DecoderSpec, x: V, layer: int) -> Iterator[tuple[V, V]]:
    """Past and new keys and values of each key/value head: the layer's own, or those of the owner of its cache."""
    at, owner, kv_heads = f"layers.{layer}.", spec.cache_layer(layer), spec.of_layer(layer).kv_heads
    if owner != layer:
        for kv in range(kv_heads):
            yield ops.cached(KvTensor(owner, "key", kv)), ops.cached(KvTensor(owner, "value", kv))
        return
    new_keys = _projected_heads(ops, spec, x, layer, "k", kv_heads)
    for kv in range(kv_heads):
        key = _rotated_head(ops, spec, layer, "k", next(new_keys), f"{at}k.h{kv}")
        name = f"{at}v.h{kv}"
        projected = name + ".projected" if spec.value_norm else name
        value = _linear(ops, spec, x, layer, "self_attn.v_proj", projected, head=kv)
        if spec.value_norm:
            value = ops.normalize(value, spec.of_layer(layer).head_dim, name)
        yield (
            ops.append_to_cache(key, KvTensor(layer, "key", kv)),
            ops.append_to_cache(value, KvTensor(layer, "value", kv)),
        )


def add_mixer(ops: Ops[V], spec: DecoderSpec, layer: int, hidden: V, mixed: V) -> V:
    """The residual after the mixer of tokens, or both; see `mixer`."""
    kinds = spec.mixers(layer)
    widths = [spec.mixer_width(layer, kind) for kind in kinds]
    return _add_mixers(ops, spec, layer, hidden, ops.split(mixed, widths) if len(kinds) > 1 else [mixed])


def _add_mixers(ops: Ops[V], spec: DecoderSpec, layer: int, hidden: V, mixed: list[V]) -> V:
    """The residual after the mixers of tokens; the last sum has the name that others read."""
    at, kinds = f"layers.{layer}.", spec.mixers(layer)
    for number, (kind, own) in enumerate(zip(kinds, mixed, strict=False), 1):
        projection, name = _MIXER_OUTPUTS[kind]
        added = _linear(ops, spec, own, layer, projection, at + name)
        if spec.post_norms:
            norm = f"model.layers.{layer}.post_attention_layernorm.weight"
            added = ops.rms_norm(added, norm, at + "attention_post_norm")
        hidden = ops.add(hidden, added, at + ("attention_add" if number == len(kinds) else f"{kind}_add"))
    return hidden


def feed_forward_inputs(ops: Ops[V], spec: DecoderSpec, layer: int, hidden: V) -> V:
    """The input of gate_proj and up_proj, of the residual that they read: see `decoder_layer`.

    The residual if there are none.
    """
    if not spec.pre_norms or not spec.has_feed_forward(layer):
        return hidden
    if spec.parallel == "one-norm":
        return mixer_inputs(ops, spec, layer, hidden)
    return _residual_norm(ops, spec, hidden, feed_forward_norm(spec, layer), f"layers.{layer}.mlp_norm")


def feed_forward(ops: Ops[V], spec: DecoderSpec, layer: int, x: V) -> V:
    """The input of down_proj; of experts, those of all of them, joined; x without a feed-forward."""
    if not spec.has_feed_forward(layer):
        return x
    at = f"layers.{layer}."
    if spec.has_experts(layer):
        return ops.join(expert_inners(ops, spec, layer, x), at + "expert")
    if not spec.gated:
        up = _linear(ops, spec, x, layer, "mlp.up_proj", at + "up")
        if spec.activation == "xielu":
            return xielu(ops, layer, up)
        if spec.activation != "relu2":
            return _gelu(ops, spec, up, at + "mlp")
        rectified = ops.relu(up, at + "relu")
        return ops.multiply(rectified, rectified, at + "mlp")
    gate = _linear(ops, spec, x, layer, "mlp.gate_proj", at + "gate")
    up = _linear(ops, spec, x, layer, "mlp.up_proj", at + "up")
    active = ops.silu(gate, at) if spec.activation == "silu" else _gelu(ops, spec, gate, at + "gelu")
    return ops.multiply(active, up, at + "mlp")


_RAISED = 20.0
"""How far scores of chosen experts are raised above others: exp(-20) is far below half a step of 16 bits."""


def routed(ops: Ops[V], spec: DecoderSpec, layer: int, x: V) -> tuple[V, V]:
    """The weights of experts, and 1 for each that is chosen, otherwise 0: both `[1, 1, AR, E]`."""
    assert spec.experts is not None, "the layer has some"
    experts, at = spec.experts, f"layers.{layer}.router"
    logits = ops.linear(x, router(layer), at)
    if experts.score == "softmax":
        chosen = ops.chosen(logits, experts.used, at + "_chosen")
        if experts.normalized:
            # Weights of the others vanish: their scores are left behind.
            raised = ops.add(logits, ops.scale(chosen, _RAISED, at + "_raise"), at + "_raised")
            return ops.softmax(raised, at + "_weights"), chosen
        return ops.multiply(ops.softmax(logits, at + "_scores"), chosen, at + "_weights"), chosen
    scores = ops.sigmoid(logits, at + "_scores")
    choosing = ops.shift_by(scores, expert_scores(layer), at + "_choosing") if experts.corrected else scores
    chosen = ops.chosen(choosing, experts.used, at + "_chosen")
    if not experts.normalized:
        return ops.multiply(scores, chosen, at + "_weights"), chosen
    return ops.shares(ops.multiply(scores, chosen, at + "_kept"), at + "_weights"), chosen


def expert_inners(ops: Ops[V], spec: DecoderSpec, layer: int, x: V) -> list[V]:
    """The input of down_proj of each expert: its inner product times its weight, 0 where it is not chosen."""
    assert spec.experts is not None, "the layer has some"
    weights, _ = routed(ops, spec, layer, x)
    return [
        ops.multiply(expert_inner(ops, spec, layer, expert, x), ops.slice(weights, expert, 1), f"layers.{layer}.expert")
        for expert in range(spec.experts.count)
    ]


def expert_inner(ops: Ops[V], spec: DecoderSpec, layer: int, expert: int, x: V) -> V:
    """The product of an expert's gate and up. Experts share the encodings of their results."""
    at = f"layers.{layer}."
    gate = _linear(ops, spec, x, layer, expert_projection(expert, "gate_proj"), at + "gate")
    up = _linear(ops, spec, x, layer, expert_projection(expert, "up_proj"), at + "up")
    return ops.multiply(ops.silu(gate, at), up, at + "mlp")


def expert_sum(ops: Ops[V], spec: DecoderSpec, layer: int, inners: list[V]) -> V:
    """The sum of the experts' outputs. All sums have one encoding, in which the 0 of an expert changes nothing."""
    name = f"layers.{layer}.down"
    total, *others = (
        _linear(ops, spec, inner, layer, expert_projection(expert, "down_proj"), name)
        for expert, inner in enumerate(inners)
    )
    for other in others:
        total = ops.add(total, other, name)
    return total


def _gelu(ops: Ops[V], spec: DecoderSpec, x: V, name: str) -> V:
    return ops.exact_gelu(x, name) if spec.activation == "gelu" else ops.gelu(x, name)


def xielu(ops: Ops[V], layer: int, x: V) -> V:
    """`p r^2 + n (exp(m) - 1 - m) + x / 2`, where r is x above 0 and m is x below, of a p and an n for each layer."""
    at = f"layers.{layer}.xielu_"
    positive, negative = xielu_numbers(layer)
    above = ops.relu(x, f"layers.{layer}.relu")
    below = ops.subtract(x, above, at + "below")
    # 1 - exp(m) + m is at most 0, and has no constant that would take range.
    bent = ops.add(ops.complement(ops.exp(below, at + "exp"), 1.0, at + "complement"), below, at + "bent")
    squares = ops.scale_by(ops.multiply(above, above, at + "square"), positive, at + "squares")
    curve = ops.subtract(squares, ops.scale_by(bent, negative, at + "bend"), at + "curve")
    return ops.add(curve, ops.scale(x, XIELU_BETA, at + "line"), f"layers.{layer}.mlp")


def add_feed_forward(ops: Ops[V], spec: DecoderSpec, layer: int, hidden: V, inner: V) -> V:
    """The residual after the feed-forward: after the layer, if that has no input of its own."""
    if not spec.has_feed_forward(layer):
        return hidden
    at = f"layers.{layer}."
    if spec.experts is not None and spec.has_experts(layer):
        inners = ops.split(inner, [spec.experts.intermediate] * spec.experts.count)
        return ops.add(hidden, expert_sum(ops, spec, layer, inners), layer_result(spec, layer))
    down = _linear(ops, spec, inner, layer, "mlp.down_proj", at + "down")
    if spec.post_norms:
        norm = f"model.layers.{layer}.post_feedforward_layernorm.weight"
        down = ops.rms_norm(down, norm, at + "mlp_post_norm")
    added = ops.add(hidden, down, at + "mlp_add")
    if layer < spec.picture_layers:
        added = ops.add(added, ops.layer_input(layer), at + "picture_add")
    return added if spec.layer_inputs else _scaled(ops, spec, layer, added)


def gated_layer_input(ops: Ops[V], spec: DecoderSpec, layer: int, hidden: V) -> V:
    """The input of per_layer_projection: what the host has gathered, times a gate of the residual."""
    at = f"layers.{layer}."
    gate = _linear(ops, spec, hidden, layer, "per_layer_input_gate", at + "layer_gate")
    active = ops.silu(gate, at + "layer_") if spec.activation == "silu" else _gelu(ops, spec, gate, at + "layer_gelu")
    return ops.multiply(active, ops.layer_input(layer), at + "layer_gated")


def add_layer_input(ops: Ops[V], spec: DecoderSpec, layer: int, hidden: V, gated: V) -> V:
    """The residual after the layer."""
    at = f"layers.{layer}."
    projected = _linear(ops, spec, gated, layer, "per_layer_projection", at + "layer_out")
    norm = f"model.layers.{layer}.post_per_layer_input_norm.weight"
    added = ops.add(hidden, ops.rms_norm(projected, norm, at + "layer_input_norm"), at + "layer_input_add")
    return _scaled(ops, spec, layer, added)


def _scaled(ops: Ops[V], spec: DecoderSpec, layer: int, hidden: V) -> V:
    if not spec.layer_scalars:
        return hidden
    return ops.scale_by(hidden, layer_scalar(layer), layer_result(spec, layer))


def last_norm(ops: Ops[V], spec: DecoderSpec, hidden: V) -> V:
    """The normalized result of the last layer."""
    return _residual_norm(ops, spec, hidden, FINAL_NORM, FINAL_NORM_RESULT, gain=spec.head_gain)


def head_inputs(ops: Ops[V], spec: DecoderSpec, hidden: V) -> V:
    """The input of the head: the last norm x, and `x + x @ turn.T` if a matrix turns it."""
    return _turned(ops, spec, last_norm(ops, spec, hidden))


def _turned(ops: Ops[V], spec: DecoderSpec, x: V) -> V:
    return ops.add(x, ops.linear(x, HEAD_TURN, "head.turn"), "head.input") if spec.vocabulary == "turned" else x


def logits(ops: Ops[V], spec: DecoderSpec, hidden: V) -> V:
    """The last norm and the head; what drafters read is given between them."""
    x = last_norm(ops, spec, hidden)
    _give_hidden(ops, spec, x)
    return head_logits(ops, spec, _turned(ops, spec, x))


def part_end(ops: GraphOps[V], spec: DecoderSpec, graph: GraphRecord, part: PartRecord, hidden: V) -> V:
    """The logits of a part with a head, otherwise the residual; what drafters read is given of every row.

    Args:
        ops: build the part.
        hidden: the residual after them.
    """
    selects = part.head and bool(part.layers) and graph.role == "prefill"
    if part.ends(spec.layers) and (spec.gives_hidden or spec.target is not None):
        x = last_norm(ops, spec, hidden)
        _give_hidden(ops, spec, x)
        x = ops.select(x) if selects else x
    elif part.head:
        x = last_norm(ops, spec, ops.select(hidden) if selects else hidden)
    return head_logits(ops, spec, _turned(ops, spec, x)) if part.head else hidden


def _give_hidden(ops: Ops[V], spec: DecoderSpec, x: V) -> None:
    """Give the result of the last norm, or what a drafter makes of it."""
    if spec.target is not None:
        ops.give_hidden(ops.linear(x, TARGET_OUT, TARGET_OUT_RESULT))
    elif spec.gives_hidden:
        ops.give_hidden(x)


def head_logits(ops: Ops[V], spec: DecoderSpec, x: V) -> V:
    """The head on its inputs: as many logits as its matrix has rows."""
    bias = HEAD_BIAS if "lm_head" in spec.biased else None
    if spec.logits_cap is None:
        return ops.linear(x, HEAD, "head", bias=bias)
    gain = 1.0 if spec.shares_vocabulary else 1 / spec.logits_cap
    uncapped = ops.linear(x, HEAD, "head.uncapped", bias=bias, gain=gain)
    return ops.scale(ops.tanh(uncapped, "head.tanh"), spec.logits_cap, "head")


def query_gain(spec: DecoderSpec) -> float:
    """All factors of the scores, which are folded into the queries."""
    return spec.query_gain / (spec.attention_cap or 1.0)


def _residual_norm(ops: Ops[V], spec: DecoderSpec, hidden: V, norm: str, name: str, *, gain: float = 1.0) -> V:
    """RMSNorm of the residual; it reads a split channel once for each part."""
    if not spec.split:
        return ops.rms_norm(hidden, norm, name, gain=gain)
    copies = []
    for split in spec.split:
        block, parts = ops.slice(hidden, split.channel, 1), 1
        while parts < split.parts:
            if parts > 1:
                block = ops.join([block] * 4, f"{name}.c{split.channel}x{parts}")
            copies += [block] * 3
            parts *= 4
    wide = ops.rms_norm(ops.join([hidden, *copies], name + ".input"), norm, name + ".wide", gain=gain)
    return ops.slice(wide, 0, spec.hidden)


def _projected_heads(
    ops: Ops[V], spec: DecoderSpec, x: V, layer: int, kind: Literal["q", "k"], count: int
) -> Iterator[V]:
    """Query or key heads before the norm of each and their rotation, each computed on demand.

    All factors of the scores are folded into the queries.
    """
    gain = query_gain(spec) if kind == "q" else 1.0
    at, projection = f"layers.{layer}.{kind}", f"self_attn.{kind}_proj"
    if (qk_norm := spec.qk_norm_of(layer)) == "all-heads":
        projected = _linear(ops, spec, x, layer, projection, at + ".projected")
        normed = ops.rms_norm(projected, _head_norm(layer, kind), at, gain=gain)
        yield from ops.split(normed, [spec.of_layer(layer).head_dim] * count)
        return
    for head in range(count):
        if qk_norm is None:
            yield _linear(ops, spec, x, layer, projection, f"{at}.h{head}", head=head, gain=gain)
        else:
            yield _linear(ops, spec, x, layer, projection, f"{at}.h{head}.projected", head=head)


def _rotated_head(
    ops: Ops[V], spec: DecoderSpec, layer: int, kind: Literal["q", "k"], x: V, name: str, heads: int = 1
) -> V:
    """A query or key head, or several query heads as rows, as scores read them."""
    if spec.qk_norm_of(layer) != "head":
        return ops.rotate(spec, layer, x, name, heads)
    gain, norm = query_gain(spec) if kind == "q" else 1.0, _head_norm(layer, kind)
    if spec.qk_norm_last:
        return ops.rms_norm(ops.rotate(spec, layer, x, name + ".projected", heads), norm, name, gain=gain)
    return ops.rotate(spec, layer, ops.rms_norm(x, norm, name, gain=gain), name, heads)


def _head_norm(layer: int, kind: Literal["q", "k"]) -> str:
    return f"model.layers.{layer}.self_attn.{kind}_norm.weight"


def _head_gates(ops: Ops[V], spec: DecoderSpec, x: V, layer: int) -> list[V]:
    """What multiplies the output of each head, `[1, 1, AR, 1]`; empty if nothing does."""
    if not spec.head_gates:
        return []
    at = f"layers.{layer}."
    gates = _linear(ops, spec, x, layer, "self_attn.g_proj", at + "head_gate")
    return ops.heads_of(ops.sigmoid(gates, at + "head_gate_sigmoid"), spec.heads)


def _output_gates(ops: Ops[V], spec: DecoderSpec, x: V, layer: int) -> V:
    """What multiplies the outputs of all heads, `[1, 1, AR, heads * D]`."""
    at = f"layers.{layer}.output_gate"
    heads = (_linear(ops, spec, x, layer, "self_attn.g_proj", f"{at}.h{head}", head=head) for head in range(spec.heads))
    return ops.join([ops.sigmoid(gate, at + "_sigmoid") for gate in heads], at + "_sigmoid")


def _scores(ops: Ops[V], spec: DecoderSpec, layer: int, query: V, keys: V, kv: int) -> V:
    """The scores of one query head of a group, or of all; they have one encoding."""
    at = f"layers.{layer}."
    if spec.attention_cap is None:
        return ops.scores(query, keys, f"{at}scores.g{kv}")
    uncapped = ops.scores(query, keys, f"{at}uncapped.g{kv}")
    return ops.scale(ops.tanh(uncapped, f"{at}tanh.g{kv}"), spec.attention_cap, f"{at}scores.g{kv}")


def _linear(
    ops: Ops[V],
    spec: DecoderSpec,
    x: V,
    layer: int,
    projection: str,
    name: str,
    *,
    head: int | None = None,
    gain: float = 1.0,
) -> V:
    key = f"model.layers.{layer}.{projection}"
    bias = key + ".bias" if projection in spec.biased else None
    y = ops.linear(x, key + ".weight", name, bias=bias, head=head, gain=gain)
    target = _TARGETS.get(projection)
    return y if target is None else ops.adapt(y, x, layer, target, name, head=head)
