"""The vision encoder, written once over the operations of `EncoderOps`.

LayerNorm is `normalize`, as RMSNorm is: matrices that write the residual are stored without the mean of their outputs,
so that every row has the mean 0 and its deviation is its root mean square; weights and biases of norms are in the
matrices that read them. Both are exact. A norm of merged patches needs the means of each, which are a second residual
of width 1 then; if it follows a norm of each patch, the mean of the merged ones is taken away before it. Where the
merged ones are averaged, the bias of the norm is added to their averages.
DeepStack's mergers read the residual behind some layers; where they have such a norm, it has the means too.
Pictures come as patches in the order of the squares that the projector merges, so that merging
moves nothing. Those of a picture with a shape of its own are followed by inputs that no patch sees; where layers
attend within windows, patches come window by window, and those inputs are behind or between them.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar

from edgekv.graphs.decoder import BlockOps
from edgekv.spec import (
    CENTER,
    LAST_NORM,
    LAST_NORM_BIAS,
    LAYER_ROWS,
    LAYER_ROWS_BIAS,
    LAYER_ROWS_NORM,
    LAYER_ROWS_PORT,
    MERGED_MEANS,
    PATCHES,
    PATCHES_BIAS,
    POSITIONS,
    PROJECTOR,
    PROJECTOR_BIAS,
    PROJECTOR_OUT,
    PROJECTOR_OUT_BIAS,
    ROWS_PORT,
    TABLE,
    EncoderSpec,
    bias_of,
    deepstack_fc1,
    deepstack_fc2,
    deepstack_port,
    low_of,
    mean_of,
)

V = TypeVar("V")


class EncoderOps(BlockOps[V], Protocol[V]):
    """The operations of an encoder. Activations are `[1, 1, patches, width]`."""

    def plus(self, x: V, weight: str, name: str) -> V:
        """`x` plus a stored tensor of its shape or its width."""

    def places(self) -> V:
        """How much of each row of the table of positions an input gets, `[1, 1, inputs, table_side**2]`."""

    def turns(self) -> tuple[V, V]:
        """Cosines and sines of each patch, `[1, 1, inputs, head_dim]`; the first half of the sines is negative."""

    def unpadded(self, scores: V, name: str, *, in_windows: bool = False) -> V:
        """The scores lowered at inputs that are no patches."""

    def in_windows(self, x: V) -> list[V]:
        """The patches of `x` by windows, in one tensor `[1, windows, patches, width]` or in several."""

    def from_windows(self, parts: list[V]) -> V:
        """Of such parts the patches of all windows, `[1, 1, inputs, width]`."""

    def rms_norm(self, x: V, weight: str, name: str) -> V:
        """`x / rms(x) * weight`, over the width."""

    def rms_norm_parts(self, x: V, weight: str, parts: int, eps: float, name: str) -> V:
        """The same over each of equal parts of the width, with the same weights."""

    def bounded(self, x: V, name: str) -> V:
        """A result clipped to its bounds, if it has some. Integers are: their encodings reach no further."""

    def patches(self, x: V) -> V:
        """`x` without the row of a class behind the patches, if there is one."""

    def merged(self, x: V, rows: int) -> V:
        """Patches of `x` next to each other, `[1, 1, patches / rows, rows * width]`, in the encoding of `x`."""

    def averaged(self, x: V, rows: int, name: str) -> V:
        """The averages of patches of `x`, `[1, 1, patches / rows, width]`."""

    def unmerged(self, x: V) -> V:
        """`[1, 1, rows, n]` as `[1, 1, rows * n, 1]`, in the encoding of `x`."""

    def normalize_merged(self, x: V, name: str) -> V:
        """`x / rms(x)` over the width of merged patches, with the projector's epsilon."""


class Residual(NamedTuple, Generic[V]):
    """What layers add to.

    Attributes:
        rows: `[1, 1, inputs, hidden]`, each of the mean 0.
        means: those that they would have, `[1, 1, inputs, 1]`; None if nothing reads them.
    """

    rows: V
    means: V | None


def _linear(
    ops: EncoderOps[V],
    spec: EncoderSpec,
    x: V,
    weight: str,
    name: str,
    *,
    bias: str | None = None,
    head: int | None = None,
    gain: float = 1.0,
) -> V:
    """A product with a matrix of 8 or 16 bits; see `BlockOps.linear` and `EncoderSpec.wide`."""
    if weight not in spec.wide:
        return ops.linear(x, weight, name, bias=bias, head=head, gain=gain)
    high = ops.linear(x, weight, name + "_high", bias=bias, head=head, gain=gain)
    return ops.add(high, ops.linear(x, low_of(weight), name + "_low", head=head, gain=gain), name)


def encoder_entry(ops: EncoderOps[V], spec: EncoderSpec, pixels: V) -> Residual[V]:
    """The residual before the first layer, from pixels `[1, 1, inputs, 3 * patch**2]`."""
    if spec.gemma_layers:
        seen = _linear(ops, spec, pixels, PATCHES, "vision.patches")
        return Residual(ops.add(seen, _linear(ops, spec, ops.places(), TABLE, "vision.places"), "vision.entry"), None)
    if spec.has_shapes and not spec.has_table:  # the rotary embedding has all positions
        return Residual(_linear(ops, spec, pixels, PATCHES, "vision.entry"), None)
    if spec.has_shapes:
        seen, places = _linear(ops, spec, pixels, PATCHES, "vision.patches", bias=PATCHES_BIAS), ops.places()
        rows = ops.add(seen, _linear(ops, spec, places, TABLE, "vision.places"), "vision.entry")
        if not spec.keeps_means:
            return Residual(rows, None)
        means = ops.linear(pixels, mean_of(PATCHES), "vision.patch_means", bias=mean_of(PATCHES_BIAS))
        of_places = ops.linear(places, mean_of(TABLE), "vision.place_means")
        return Residual(rows, ops.add(means, of_places, "vision.entry_means"))
    rows = ops.plus(_linear(ops, spec, pixels, PATCHES, "vision.patches"), POSITIONS, "vision.entry")
    if not spec.keeps_means:
        return Residual(rows, None)
    means = ops.linear(pixels, mean_of(PATCHES), "vision.patch_means")
    return Residual(rows, ops.plus(means, mean_of(POSITIONS), "vision.entry_means"))


def encoder_layer(ops: EncoderOps[V], spec: EncoderSpec, layer: int, residual: Residual[V]) -> Residual[V]:
    """One layer: attention, and a feed-forward, each added to the residual.

    Keys have no bias, which adds the same to all scores of a patch, unless they are rotated; that of values is in the
    bias of `o_proj`.
    """
    if spec.gemma_layers:
        return _gemma_layer(ops, spec, layer, residual)
    at, outputs = f"vision.layers.{layer}.", []
    if layer >= spec.mean_layers:
        residual = Residual(residual.rows, None)
    x = ops.normalize(residual.rows, spec.hidden, at + "attention_norm")
    for head in range(spec.heads):
        outputs.append(_attention(ops, spec, layer, [_head(ops, spec, x, at, kind, head) for kind in "qkv"], head))
    residual = _added(ops, spec, residual, ops.join(outputs, at + "attention"), at, "o_proj")
    x = ops.normalize(residual.rows, spec.hidden, at + "mlp_norm")
    inner = _linear(ops, spec, x, at + "fc1.weight", at + "fc1", bias=at + "fc1.bias")
    inner = _gelu(ops, spec, inner, at + "gelu") if spec.feed_forward == "gelu" else ops.silu(inner, at)
    if spec.feed_forward == "gated":
        up = _linear(ops, spec, x, at + "up.weight", at + "up", bias=at + "up.bias")
        inner = ops.multiply(inner, up, at + "gated")
    return _added(ops, spec, residual, inner, at, "fc2")


def _attention(ops: EncoderOps[V], spec: EncoderSpec, layer: int, heads: list[V], head: int) -> V:
    """The attention of a head, of its queries, keys and values: of all patches to all, or within windows."""
    at, windowed, outputs = f"vision.layers.{layer}.", spec.is_windowed(layer), list[V]()
    parts = zip(*(ops.in_windows(x) if windowed else [x] for x in heads), strict=True)
    for query, key, value in parts:
        scores = ops.scores(query, key, f"{at}scores.h{head}")
        if spec.has_shapes:
            scores = ops.unpadded(scores, f"{at}unpadded.h{head}", in_windows=windowed)
        outputs.append(ops.attend(ops.softmax(scores, "vision.probabilities"), value, at + "attention"))
    return ops.from_windows(outputs) if windowed else outputs[0]


def _head(ops: EncoderOps[V], spec: EncoderSpec, x: V, at: str, kind: str, head: int) -> V:
    """The queries, keys or values of a head, rotated if they are."""
    name, rotates = f"{at}{kind}.h{head}", spec.rotary_theta is not None and kind != "v"
    projected = _linear(
        ops,
        spec,
        x,
        f"{at}{kind}_proj.weight",
        name + ".projected" if rotates else name,
        bias=f"{at}{kind}_proj.bias" if rotates or kind == "q" else None,
        head=head,
        gain=spec.head_dim**-0.5 if kind == "q" else 1.0,
    )
    if not rotates:
        return projected
    return _rotated(ops, spec, projected, name)


def _rotated(ops: EncoderOps[V], spec: EncoderSpec, x: V, name: str) -> V:
    cos, sin = ops.turns()
    swapped = ops.swap_halves(x, spec.head_dim // 2)
    return ops.add(ops.multiply(x, cos, name + ".cos"), ops.multiply(swapped, sin, name + ".sin"), name)


def _gemma_layer(ops: EncoderOps[V], spec: EncoderSpec, layer: int, residual: Residual[V]) -> Residual[V]:
    """A layer with `gemma_layers`; see `EncoderSpec`. Scores are products of what is normalized, as they are."""
    at, rows, outputs = f"vision.layers.{layer}.", residual.rows, []
    read = _gemma_inputs(ops, spec, rows, at + "attention_norm", ("q", "k", "v"))
    for head in range(spec.heads):
        query, key, value = (_gemma_head(ops, spec, x, at, kind, head) for kind, x in zip("qkv", read, strict=True))
        scores = ops.unpadded(ops.scores(query, key, f"{at}scores.h{head}"), f"{at}unpadded.h{head}")
        outputs.append(ops.attend(ops.softmax(scores, "vision.probabilities"), value, at + "attention"))
    x = ops.bounded(ops.join(outputs, at + "attention"), at + "attention")
    x = ops.bounded(_linear(ops, spec, x, at + "o_proj.weight", at + "o_proj"), at + "o_proj")
    rows = ops.add(
        rows, ops.rms_norm(x, at + "attention_out_norm.weight", at + "attention_out_norm"), at + "o_proj_add"
    )
    gate, up = (
        ops.bounded(_linear(ops, spec, x, f"{at}{matrix}.weight", at + matrix), at + matrix)
        for matrix, x in zip(("fc1", "up"), _gemma_inputs(ops, spec, rows, at + "mlp_norm", ("fc1", "up")), strict=True)
    )
    inner = ops.bounded(ops.multiply(_gelu(ops, spec, gate, at + "gelu"), up, at + "gated"), at + "gated")
    x = ops.bounded(_linear(ops, spec, inner, at + "fc2.weight", at + "fc2"), at + "fc2")
    return Residual(
        ops.add(rows, ops.rms_norm(x, at + "mlp_out_norm.weight", at + "mlp_out_norm"), at + "fc2_add"), None
    )


def _gemma_inputs(ops: EncoderOps[V], spec: EncoderSpec, rows: V, norm: str, kinds: tuple[str, ...]) -> list[V]:
    """What each of some matrices reads of the residual: one result for all that have the same bounds."""
    if not spec.clipped:
        return [ops.normalize(rows, spec.hidden, norm)] * len(kinds)
    inputs = dict[tuple[float, float] | None, V]()
    read = list[V]()
    for kind in kinds:
        name = f"{norm}.{kind}"
        bound = spec.bound_of(name)
        ends = None if bound is None else (bound.low, bound.high)
        if ends not in inputs:
            inputs[ends] = ops.bounded(ops.rms_norm(rows, norm + ".weight", name), name)
        read.append(inputs[ends])
    return read


def _gemma_head(ops: EncoderOps[V], spec: EncoderSpec, x: V, at: str, kind: str, head: int) -> V:
    """The queries, keys or values of a head, normalized, and rotated but for values."""
    name, result = f"{at}{kind}.h{head}", f"{at}{kind}.projected.h{head}"
    projected = ops.bounded(_linear(ops, spec, x, f"{at}{kind}_proj.weight", result, head=head), result)
    if kind == "v":
        return ops.normalize(projected, spec.head_dim, name)
    return _rotated(ops, spec, ops.rms_norm(projected, f"{at}{kind}_norm.weight", name + ".norm"), name)


def _added(ops: EncoderOps[V], spec: EncoderSpec, residual: Residual[V], x: V, at: str, matrix: str) -> Residual[V]:
    """The residual plus the results of a matrix."""
    weight, bias, name, means = f"{at}{matrix}.weight", f"{at}{matrix}.bias", at + matrix, residual.means
    rows = ops.add(residual.rows, _linear(ops, spec, x, weight, name, bias=bias), name + "_add")
    if means is not None:
        more = ops.linear(x, mean_of(weight), name + "_mean", bias=mean_of(bias))
        means = ops.add(means, more, name + "_mean_add")
    return Residual(rows, means)


def deepstack_rows(ops: EncoderOps[V], spec: EncoderSpec, number: int, residual: Residual[V]) -> V:
    """What the decoder adds behind its layer `number`, from the residual behind `spec.deepstack[number]`."""
    at = f"vision.deepstack.{number}."
    merged = ops.normalize_merged(_with_means(ops, spec, residual, at), at + "norm")
    inner = _linear(ops, spec, merged, deepstack_fc1(number), at + "fc1", bias=bias_of(deepstack_fc1(number)))
    inner = ops.exact_gelu(inner, at + "gelu")
    return _linear(ops, spec, inner, deepstack_fc2(number), at + "rows", bias=bias_of(deepstack_fc2(number)))


def layer_rows(ops: EncoderOps[V], spec: EncoderSpec, rows: V) -> V:
    """What the layers of the decoder read of rows, `[1, 1, rows, layers * width]`."""
    sizes = spec.layer_rows
    assert sizes is not None, "an encoder of a decoder whose layers have inputs"
    x = _linear(ops, spec, rows, LAYER_ROWS, "vision.layer_rows_projection")
    x = ops.rms_norm_parts(x, LAYER_ROWS_NORM, sizes.layers, sizes.eps, "vision.layer_rows_norm")
    return ops.plus(x, LAYER_ROWS_BIAS, "vision.layer_rows")


def encoded(ops: EncoderOps[V], spec: EncoderSpec, pixels: V) -> dict[str, V]:
    """All of an encoder: its outputs by name."""
    residual, outputs = encoder_entry(ops, spec, pixels), dict[str, V]()
    for layer in range(spec.layers):
        residual = encoder_layer(ops, spec, layer, residual)
        if layer in spec.deepstack:
            number = spec.deepstack.index(layer)
            outputs[deepstack_port(number)] = deepstack_rows(ops, spec, number, residual)
    rows = encoder_exit(ops, spec, residual)
    if spec.layer_rows is not None:
        outputs[LAYER_ROWS_PORT] = layer_rows(ops, spec, rows)
    return {ROWS_PORT: rows, **outputs}


def encoder_exit(ops: EncoderOps[V], spec: EncoderSpec, residual: Residual[V]) -> V:
    """The rows that stand in a prompt, `[1, 1, rows, output]`."""
    x = _merged(ops, spec, residual)
    if spec.projector == "matrix":
        return _linear(ops, spec, x, PROJECTOR, "vision.rows", bias=None if spec.gemma_layers else PROJECTOR_BIAS)
    inner = _linear(ops, spec, x, PROJECTOR, "vision.projector", bias=PROJECTOR_BIAS)
    x = ops.exact_gelu(inner, "vision.projector_gelu")
    return _linear(ops, spec, x, PROJECTOR_OUT, "vision.rows", bias=PROJECTOR_OUT_BIAS)


def _merged(ops: EncoderOps[V], spec: EncoderSpec, residual: Residual[V]) -> V:
    """What the projector reads: patches that become one row next to each other, normalized before or behind that."""
    if spec.norms == "merged":
        return ops.normalize_merged(_with_means(ops, spec, residual, "vision."), "vision.last_norm")
    x = ops.patches(residual.rows)
    if spec.norms == "averages":
        return ops.normalize_merged(ops.averaged(x, spec.merged, "vision.averages"), "vision.merged_norm")
    if spec.norms == "patches":
        return ops.merged(ops.normalize(x, spec.hidden, "vision.last_norm"), spec.merged)
    weighted = ops.rms_norm(x, LAST_NORM, "vision.last_norm")
    if spec.pooled:
        averages = ops.averaged(weighted, spec.merged, "vision.averages")
        return ops.normalize_merged(ops.plus(averages, LAST_NORM_BIAS, "vision.last_norm_bias"), "vision.merged_norm")
    x = ops.merged(ops.plus(weighted, LAST_NORM_BIAS, "vision.last_norm_bias"), spec.merged)
    x = ops.add(x, ops.linear(x, CENTER, "vision.center"), "vision.centered")
    return ops.normalize_merged(x, "vision.merged_norm")


def _with_means(ops: EncoderOps[V], spec: EncoderSpec, residual: Residual[V], at: str) -> V:
    """Patches that become one row next to each other, each with its mean less that of all of them."""
    x, means = ops.patches(residual.rows), residual.means
    assert means is not None, "a norm of merged patches alone needs them"
    merged = ops.linear(ops.merged(ops.patches(means), spec.merged), MERGED_MEANS, at + "merged_means")
    return ops.merged(ops.add(x, ops.unmerged(merged), at + "with_means"), spec.merged)


def _gelu(ops: EncoderOps[V], spec: EncoderSpec, x: V, name: str) -> V:
    return ops.exact_gelu(x, name) if spec.exact_gelu else ops.gelu(x, name)
