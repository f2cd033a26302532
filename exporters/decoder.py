"""The decoder, written once, for whatever carries it out: numpy (`reference`) or a graph builder (`qdq`).

Attention is single-head throughout: a query head has its own matrices, scores and softmax, and reads the keys
and values of the head that its group shares. Every result has a name; ranges are observed and encodings are
looked up under it. Results that must keep one encoding through slices and joins share one name.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from edgekv.kv import KvTensor
from exporters.spec import DecoderSpec

V = TypeVar("V")


class Ops(Protocol[V]):
    """The operations a decoder needs. Activations are `[1, 1, AR, width]`; joins and slices are along width."""

    def linear(self, x: V, weight: str, name: str, *, head: int | None = None, gain: float = 1.0) -> V:
        """`x @ weight.T * gain`; with `head`, only the output channels of that head (head_dim wide)."""

    def rms_norm(self, x: V, weight: str, name: str) -> V: ...

    def add(self, a: V, b: V, name: str) -> V: ...

    def subtract(self, a: V, b: V, name: str) -> V: ...

    def multiply(self, a: V, b: V, name: str) -> V: ...

    def sigmoid(self, x: V, name: str) -> V: ...

    def halves(self, x: V) -> tuple[V, V]:
        """The first and the second half of the width, in the encoding of `x`."""

    def join(self, parts: list[V], name: str) -> V:
        """Side by side; the parts and the result have the encoding of `name`."""

    def remember(self, new: V, tensor: KvTensor) -> V:
        """Past and new rows `[1, 1, S, D]` of one cache tensor, in the cache's encoding."""

    def scores(self, query: V, keys: V, name: str) -> V:
        """`query @ keys.T`, `[1, 1, AR, S]`."""

    def masked(self, scores: V, name: str) -> V:
        """The scores with the attention mask added."""

    def softmax(self, x: V, name: str) -> V: ...

    def attend(self, weights: V, values: V, name: str) -> V:
        """`weights @ values`, `[1, 1, AR, D]`."""

    @property
    def cos(self) -> V:
        """`[1, 1, AR, D/2]`."""

    @property
    def sin(self) -> V:
        """`[1, 1, AR, D/2]`."""


def decoder_layer(ops: Ops[V], spec: DecoderSpec, layer: int, hidden: V) -> V:
    """One layer: attention and feed-forward, each on the normalized residual and added to it."""
    at, weights = f"layers.{layer}.", f"model.layers.{layer}."
    x = ops.rms_norm(hidden, weights + "input_layernorm.weight", at + "attention_norm")
    attended = _attention(ops, spec, layer, x)
    hidden = ops.add(hidden, ops.linear(attended, weights + "self_attn.o_proj.weight", at + "o"), at + "attention_add")
    x = ops.rms_norm(hidden, weights + "post_attention_layernorm.weight", at + "mlp_norm")
    gate = ops.linear(x, weights + "mlp.gate_proj.weight", at + "gate")
    up = ops.linear(x, weights + "mlp.up_proj.weight", at + "up")
    silu = ops.multiply(gate, ops.sigmoid(gate, at + "sigmoid"), at + "silu")
    down = ops.linear(ops.multiply(silu, up, at + "mlp"), weights + "mlp.down_proj.weight", at + "down")
    return ops.add(hidden, down, at + "mlp_add")


def logits(ops: Ops[V], head: str, hidden: V) -> V:
    """The last norm and the head, whose matrix is the tensor `head`."""
    return ops.linear(ops.rms_norm(hidden, "model.norm.weight", "final_norm"), head, "head")


def _attention(ops: Ops[V], spec: DecoderSpec, layer: int, x: V) -> V:
    at, weights = f"layers.{layer}.", f"model.layers.{layer}.self_attn."
    outputs = []
    for kv in range(spec.kv_heads):
        key = _rotate(ops, ops.linear(x, weights + "k_proj.weight", f"{at}k.h{kv}", head=kv), f"{at}k.h{kv}")
        value = ops.linear(x, weights + "v_proj.weight", f"{at}v.h{kv}", head=kv)
        keys = ops.remember(key, KvTensor(layer, "key", kv))
        values = ops.remember(value, KvTensor(layer, "value", kv))
        for head in range(kv * spec.group, (kv + 1) * spec.group):
            name = f"{at}q.h{head}"
            query = ops.linear(x, weights + "q_proj.weight", name, head=head, gain=spec.head_dim**-0.5)
            scores = ops.scores(_rotate(ops, query, name), keys, f"{at}scores.h{head}")
            probabilities = ops.softmax(ops.masked(scores, f"{at}masked.h{head}"), "probabilities")
            outputs.append(ops.attend(probabilities, values, at + "attention"))
    return ops.join(outputs, at + "attention")


def _rotate(ops: Ops[V], x: V, name: str) -> V:
    """Rotary embedding in the half-split form of Llama: pairs are (i, i + D/2)."""
    first, second = ops.halves(x)
    turned = [
        ops.subtract(
            ops.multiply(first, ops.cos, name + ".x_cos"),
            ops.multiply(second, ops.sin, name + ".y_sin"),
            name + ".rotated",
        ),
        ops.add(
            ops.multiply(second, ops.cos, name + ".y_cos"),
            ops.multiply(first, ops.sin, name + ".x_sin"),
            name + ".rotated",
        ),
    ]
    return ops.join(turned, name + ".rotated")
