"""A gated delta rule (arXiv 2412.06464) or Mamba-2 (arXiv 2405.21060) as an attention over a tail, over `DeltaOps`.

S `[key_dim, value_dim]` is stored at a checkpoint. Of each token since then three rows are kept: its key k, its
correction d and the logarithm g of its decay. With G the sum of g since the checkpoint,

    w_i = b_i (v_i - e^(G_i) S^T k_i)
    A_ij = b_i e^(G_i - G_j) (k_i . k_j)
    d_i = w_i - sum over j < i of A_ij d_j
    o_i = e^(G_i) S^T q_i + sum over j <= i of e^(G_i - G_j) (q_i . k_j) d_j

so a step reads S and rows, and writes rows alone. Of the tokens of a step, whose d depend on each other, the first sum
is a triangular system: prefill solves it for all at once, see `solve`; decode and verify graphs go token by token.
Rows of the tail that S includes already, and rows before the first token, are 0: they decay nothing and add nothing.

Mamba-2 has no b and corrects nothing: its d_i follow from token i alone, and there is no system. Its values v are kept
as they are, and their steps t with the decays, g = t A: A is a number of each head, so that with S in units of 1 / A

    A o_i = e^(G_i) S^T q_i + sum over j <= i of e^(G_i - G_j) g_j (q_i . k_j) v_j

A verify graph must have the bits of a decode step, or drafts could change a text. On the HTP a product of 16-bit
integers depends on rows behind a token, whose weights are 0, and what is computed for a single row is rounded in
another way where the compiler lays it out in another way: an element times a number, a change of encoding. So each
token has products of its own, with the rows up to it, and d is one difference in the encoding of the cached rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgekv.graphs.decoder import Ops
from edgekv.kv import KvTensor
from edgekv.spec import (
    DELTA_INPUTS,
    DecoderSpec,
    DeltaRule,
    GraphRecord,
    delta_inputs,
    delta_kernel,
    delta_kernel_bias,
    delta_rates,
    delta_skips,
    delta_spans,
)
from edgekv.spec.geometry import ZERO_POINTS
from quant import Encoding

V = TypeVar("V")

UNIT_EPS = 1e-6
"""Added to the square of a query's or key's length before it is divided by."""


def between_blocks(rows: int, size: int) -> NDArray[np.float32]:
    """`[rows, rows]`: 1 below the diagonal between the two halves of each block of 2 * `size` rows; see `DeltaOps`."""
    block, half = np.divmod(np.arange(rows), 2 * size)
    same = block[:, None] == block
    mask: NDArray[np.float32] = (same & (half >= size)[:, None] & (half < size)).astype(np.float32)
    return mask


def rows_after(rows: int) -> NDArray[np.float32]:
    """`[rows, rows + 1]`: 1 where a row is after the one that the column stands for; in the last column, everywhere."""
    mask: NDArray[np.float32] = np.tri(rows, rows + 1, -1, dtype=np.float32)
    mask[:, -1] = 1
    return mask


LOG1P = (0.499586, 0.326671, 0.213745, 0.105185, 0.025387)
"""a, b, c, ... of `log(1+u)/u = 1 - u (a - u (b - u (c - ...)))`, within 1e-5 for u from 0 to 1: a minimax polynomial,
found by reweighted least squares."""

BY_STEP = r"\.delta\.(sums|decayed|pairs|weighted|scores|shares|weights|system|known_tail|rest|correction)"
"""Pattern of the names of results that depend on how a text is divided into steps."""

SHARES = Encoding("u16", 1 / 65535, 0)
"""From 0 to 1, both exact."""


def unit_encoding(factor: float) -> Encoding:
    """Of a constant that multiplies unit vectors."""
    return Encoding.asymmetric(0.0, factor, "u16")


def signed_operand(encoding: Encoding) -> Encoding:
    """The signed encoding with zero point 0 that covers an unsigned one: of the second operand of a product.

    It has every value of one whose zero point is in the middle.
    """
    if encoding.zero_point == ZERO_POINTS["u16"]:
        return Encoding("s16", encoding.scale, 0)
    low, high = encoding.reach
    return Encoding.symmetric(max(-low, high), "s16")


def gives_rows_by_step(graph: GraphRecord) -> bool:
    """Whether a graph computes each of its tokens as a step of its own; see `DeltaOps.by_row`."""
    return graph.role in ("decode", "verify")


@dataclass(frozen=True, slots=True)
class DeltaInputs(Generic[V]):
    """What the new tokens ask and write, by head.

    Attributes:
        queries: `[1, 1, AR, key_dim]`, of length `key_dim ** -0.5`; of Mamba-2 of any.
        keys: `[1, 1, AR, key_dim]`, of length 1; of Mamba-2 of any.
        values: `[1, 1, AR, value_dim]`.
        strengths: b, `[1, 1, AR, 1]`; of Mamba-2 the steps t, which its decays follow from.
        decays: g, `[1, 1, AR, 1]`, at most 0.
    """

    queries: list[V]
    keys: list[V]
    values: list[V]
    strengths: list[V]
    decays: list[V]


@dataclass(frozen=True, slots=True)
class Corrections(Generic[V]):
    """What the corrections d of a head's new tokens follow from.

    Attributes:
        target: w, `[1, 1, AR, value_dim]`.
        system: A, `[1, 1, AR, P+AR]`.
    """

    target: V
    system: V


class DeltaOps(Ops[V], Protocol[V]):
    """The operations that a gated delta rule or Mamba-2 needs besides those of other decoders."""

    @property
    def new_rows(self) -> int:
        """AR."""

    @property
    def by_row(self) -> bool:
        """Whether each new token is computed as a step of its own would compute it, to the bit: in graphs that decode
        or verify. Others solve one system for all of them.
        """

    def unit(self, x: V, width: int, name: str, *, gain: float = 1.0) -> V:
        """`x / sqrt(sum(x^2) + 1e-6) * gain`, over the width."""

    def times(self, x: V, weight: str, at: int, name: str) -> V:
        """`x * weight[at]`, an element of a stored vector."""

    def shift(self, x: V, weight: str, name: str) -> V:
        """`x + weight`, a stored vector."""

    def stored(self, tensor: KvTensor) -> V:
        """What the cache holds before the step: S of all heads `[1, 1, key_dim, value_heads * value_dim]`, or the rows
        of the tail `[1, 1, P, width]`.
        """

    def extended(self, rows: V, new: V, tensor: KvTensor) -> V:
        """`rows` of the tail and another one, `[1, 1, 1, width]`, rounded as the cache will hold it."""

    def row(self, x: V, row: int) -> V:
        """One of the new rows, `[1, 1, 1, width]`."""

    def together(self, rows: list[V], name: str) -> V:
        """All new rows, `[1, 1, AR, width]`; they have the encoding of `name`."""

    def columns(self, x: V, stop: int) -> V:
        """The columns of past rows and of the first `stop` new ones, in the encoding of `x`."""

    def new_columns(self, x: V) -> V:
        """The columns of new rows, `[1, 1, AR, AR]`, in the encoding of `x`."""

    def decay_sums(self, rows: V, name: str) -> V:
        """For each new token i and each row j of `rows` `[1, 1, P+AR, 1]`, the sum of the rows after j up to i; and,
        last, of all rows up to i: `[1, 1, AR, P+AR+1]`.
        """

    def across(self, rows: V) -> V:
        """Rows `[1, 1, P+AR, 1]` as columns for each new token, with 0 for rows after it: `[1, 1, AR, P+AR]`, in the
        encoding of `rows`.
        """

    def decays(self, sums: V, name: str) -> tuple[V, V]:
        """`exp(sums)`: of the rows, `[1, 1, AR, P+AR]`, 0 for rows after a token; and of the checkpoint,
        `[1, 1, AR, 1]`.
        """

    def between_blocks(self, system: V, size: int) -> V:
        """`[1, 1, AR, AR]` with 0 but where a row is in the second half of a block of 2 * `size` rows and the column in
        the first half of the same block, in the encoding of `system`.
        """

    def from_identity(self, x: V, name: str) -> V:
        """The identity minus x, `[1, 1, AR, AR]`."""

    def observe_known(self, target: V, correction: V, name: str) -> None:
        """Note what graphs that go row by row compute, `target - correction`, where their encodings are chosen."""

    def delta_rule(self, spec: DecoderSpec, layer: int, x: V) -> V:
        return delta_rule(self, spec, layer, x)

    def recall(self, rule: DeltaRule, layer: int, new: DeltaInputs[V]) -> list[V]:
        """The outputs o of all heads, or A o, `[1, 1, AR, value_dim]`; writes the rows of the new tokens."""
        return recall(self, rule, layer, new)


def delta_rule(ops: DeltaOps[V], spec: DecoderSpec, layer: int, x: V) -> V:
    """The concatenated outputs of all heads, normalized and gated."""
    rule = spec.delta_rule
    assert rule is not None, "the layer has one"
    return _gated_delta_rule(ops, rule, layer, x) if rule.corrects else _mamba2(ops, rule, layer, x)


def _projected(ops: DeltaOps[V], rule: DeltaRule, layer: int, x: V) -> list[V]:
    """The projections of the input, in the order of `delta_inputs`."""
    at = f"layers.{layer}.delta."
    return [
        ops.linear(
            x,
            f"model.layers.{layer}.{name}.weight",
            at + name.removeprefix("linear_attn.in_proj_"),
            bias=f"model.layers.{layer}.{name}.bias" if name == DELTA_INPUTS[3] else None,
        )
        for name in delta_inputs(rule)
    ]


def _mamba2(ops: DeltaOps[V], rule: DeltaRule, layer: int, x: V) -> V:
    """The concatenated outputs of all heads with their values times D, gated and normalized in groups, if at all."""
    at = f"layers.{layer}.delta."
    gate, channels, step = _projected(ops, rule, layer, x)
    mixed = _convolved(ops, rule, layer, channels)
    values, keys, queries = (
        ops.silu(ops.slice(mixed, first, width), f"{at}{name}_")
        for name, first, width in (
            ("value", 0, rule.values),
            ("key", rule.values, rule.keys),
            ("query", rule.values + rule.keys, rule.keys),
        )
    )
    steps = [
        _limited(ops, rule, own, f"{at}step.h{head}")
        for head, own in enumerate(softplus(ops, step, rule.value_heads, at))
    ]
    decays = [ops.times(own, delta_rates(layer), head, f"{at}decay.h{head}") for head, own in enumerate(steps)]
    new = DeltaInputs(
        queries=ops.split(queries, [rule.key_dim] * rule.key_heads),
        keys=ops.split(keys, [rule.key_dim] * rule.key_heads),
        values=ops.split(values, [rule.value_dim] * rule.value_heads),
        strengths=steps,
        decays=decays,
    )
    recalled = ops.join(ops.recall(rule, layer, new), at + "output")
    recalled = ops.scale_by(recalled, delta_spans(layer), at + "recalled")
    mixed = ops.add(recalled, ops.scale_by(values, delta_skips(layer), at + "skipped"), at + "mixed")
    norm = f"model.layers.{layer}.linear_attn.norm.weight"
    if rule.norm == "first":
        mixed = _grouped_norm(ops, rule, mixed, norm, at + "normed")
    gated = ops.multiply(mixed, ops.silu(gate, at + "gate_"), at + "gated")
    return _grouped_norm(ops, rule, gated, norm, at + "normed") if rule.norm == "gated" else gated


def _grouped_norm(ops: DeltaOps[V], rule: DeltaRule, x: V, weight: str, name: str) -> V:
    """RMSNorm over the heads of each group, those that share a key."""
    if rule.key_heads == 1:
        return ops.rms_norm(x, weight, name)
    width, normalized = rule.values // rule.key_heads, name + ".unweighted"
    groups = [ops.normalize(group, width, normalized) for group in ops.split(x, [width] * rule.key_heads)]
    return ops.scale_by(ops.join(groups, normalized), weight, name)


def _limited(ops: DeltaOps[V], rule: DeltaRule, step: V, name: str) -> V:
    """A step within the limits of all: `max(x, low) = x + relu(low - x)`, `min(x, high) = high - relu(high - x)`."""
    low, high = rule.step_limits
    if low:
        step = ops.add(step, ops.relu(ops.complement(step, low, name + ".below"), name + ".lacking"), name + ".low")
    if high is not None:
        step = ops.complement(ops.relu(ops.complement(step, high, name + ".above"), name + ".left"), high, name)
    return step


def _gated_delta_rule(ops: DeltaOps[V], rule: DeltaRule, layer: int, x: V) -> V:
    """The concatenated outputs of all heads, normalized each and gated."""
    at = f"layers.{layer}.delta."
    channels, gate, strength, decay = _projected(ops, rule, layer, x)
    mixed = ops.silu(_convolved(ops, rule, layer, channels), at)
    queries, keys, values = (
        ops.split(ops.slice(mixed, first, count * width), [width] * count)
        for first, count, width in (
            (0, rule.key_heads, rule.key_dim),
            (rule.keys, rule.key_heads, rule.key_dim),
            (2 * rule.keys, rule.value_heads, rule.value_dim),
        )
    )
    decays = [
        ops.times(rate, delta_rates(layer), head, f"{at}decay.h{head}")
        for head, rate in enumerate(softplus(ops, decay, rule.value_heads, at))
    ]
    inputs = DeltaInputs(
        queries=[ops.unit(query, rule.key_dim, at + "query", gain=rule.key_dim**-0.5) for query in queries],
        keys=[ops.unit(key, rule.key_dim, at + "key") for key in keys],
        values=values,
        strengths=ops.split(ops.sigmoid(strength, at + "strength"), [1] * rule.value_heads),
        decays=decays,
    )
    outputs = []
    gates = ops.split(ops.silu(gate, at + "gate_"), [rule.value_dim] * rule.value_heads)
    for head, output in enumerate(ops.recall(rule, layer, inputs)):
        normed = ops.rms_norm(output, f"model.layers.{layer}.linear_attn.norm.weight", f"{at}normed.h{head}")
        outputs.append(ops.multiply(normed, gates[head], at + "gated"))
    return ops.join(outputs, at + "gated")


def softplus(ops: DeltaOps[V], x: V, heads: int, at: str) -> list[V]:
    """`log(1 + exp(x))` of each head, of x `[1, 1, AR, heads]`, as `max(x, 0) + u p(u)` with `u = exp(-|x|)`.

    The HTP's own Softplus is off by hundreds of steps of 16 bits; all these operations are off by a few at most. p is
    computed for all heads at once, and u again in each head's own range: of heads that decay slowly it is small.
    """
    above = ops.relu(x, at + "above")
    size = ops.subtract(ops.subtract(x, above, at + "below"), above, at + "size")
    share = ops.exp(size, at + "share")
    factor = ops.scale(share, LOG1P[-1], at + f"term{len(LOG1P)}")
    for power in range(len(LOG1P) - 1, 0, -1):
        factor = ops.multiply(ops.complement(factor, LOG1P[power - 1], f"{at}rest{power}"), share, f"{at}term{power}")
    factor = ops.complement(factor, 1.0, at + "factor")
    logarithms = []
    parts = (ops.split(stack, [1] * heads) for stack in (size, factor, above))
    for head, (own_size, own_factor, own_above) in enumerate(zip(*parts, strict=True)):
        own_share = ops.exp(own_size, f"{at}share.h{head}")
        logarithm = ops.multiply(own_share, own_factor, f"{at}logarithm.h{head}")
        logarithms.append(ops.add(own_above, logarithm, f"{at}softplus.h{head}"))
    return logarithms


def recall(ops: DeltaOps[V], rule: DeltaRule, layer: int, new: DeltaInputs[V]) -> list[V]:
    """See `DeltaOps.recall`."""
    return _recall_corrected(ops, rule, layer, new) if rule.corrects else _recall_values(ops, rule, layer, new)


def _recall_values(ops: DeltaOps[V], rule: DeltaRule, layer: int, new: DeltaInputs[V]) -> list[V]:
    """Of Mamba-2: A o."""
    at = f"layers.{layer}.delta."
    rows = ops.append_to_cache(ops.join(new.keys, at + "key_silu"), KvTensor(layer, "delta_key", 0))
    keys = ops.split(rows, [rule.key_dim] * rule.key_heads)
    states = ops.split(ops.stored(KvTensor(layer, "recurrent", 0)), [rule.value_dim] * rule.value_heads)
    seen = _values_seen(ops, rule, layer, new.values)
    scores = [
        ops.scores(query, own, f"{at}scores.h{key}")
        for key, (query, own) in enumerate(zip(new.queries, keys, strict=True))
    ]
    outputs = []
    for head, decay in enumerate(new.decays):
        key, of_head = head // rule.group, f".h{head}"
        held = ops.append_to_cache(decay, KvTensor(layer, "decay", head))
        decayed, start = ops.decays(ops.decay_sums(held, f"{at}sums{of_head}"), at + "decayed")
        shares = ops.multiply(decayed, ops.across(held), f"{at}shares{of_head}")
        weights = ops.multiply(scores[key], shares, f"{at}weights{of_head}")
        begun = ops.attend(new.queries[key], states[head], f"{at}held{of_head}")
        begun = ops.multiply(begun, start, f"{at}held_left{of_head}")
        added = _added(ops, weights, [rows_by_head[head] for rows_by_head in seen], f"{at}added{of_head}")
        outputs.append(ops.add(begun, added, at + "output"))
    return outputs


def _values_seen(ops: DeltaOps[V], rule: DeltaRule, layer: int, values: list[V]) -> list[list[V]]:
    """The cached rows v by head, past and new: once for all new tokens, or for each one those up to its own."""
    tensor, widths = KvTensor(layer, "delta_value", 0), [rule.value_dim] * rule.value_heads
    new, seen = ops.join(values, f"layers.{layer}.delta.value_silu"), list[V]()
    if ops.by_row and ops.new_rows > 1:
        rows = ops.stored(tensor)
        for row in range(ops.new_rows - 1):
            rows = ops.extended(rows, ops.row(new, row), tensor)
            seen.append(rows)
    return [ops.split(rows, widths) for rows in (*seen, ops.append_to_cache(new, tensor))]


def _added(ops: DeltaOps[V], weights: V, seen: list[V], name: str) -> V:
    """The weighted sums of a head's rows: of all new tokens together, or each over the rows that it sees."""
    if len(seen) == 1:
        return ops.attend(weights, seen[0], name)
    of_rows = [ops.columns(ops.row(weights, row), row + 1) for row in range(len(seen))]
    return ops.together([ops.attend(x, rows, name) for x, rows in zip(of_rows, seen, strict=True)], name)


def _recall_corrected(ops: DeltaOps[V], rule: DeltaRule, layer: int, new: DeltaInputs[V]) -> list[V]:
    """Of a gated delta rule: o."""
    at, widths = f"layers.{layer}.delta.", [rule.value_dim] * rule.value_heads
    rows = ops.append_to_cache(ops.join(new.keys, at + "key"), KvTensor(layer, "delta_key", 0))
    keys = ops.split(rows, [rule.key_dim] * rule.key_heads)
    states = ops.split(ops.stored(KvTensor(layer, "recurrent", 0)), widths)
    decays, corrections = [], []
    for head, (value, strength) in enumerate(zip(new.values, new.strengths, strict=True)):
        key, of_head = head // rule.group, f".h{head}"
        sums = ops.append_to_cache(new.decays[head], KvTensor(layer, "decay", head))
        decayed, start = ops.decays(ops.decay_sums(sums, f"{at}sums{of_head}"), at + "decayed")
        scores = ops.scores(new.keys[key], keys[key], f"{at}pairs.h{key}")
        weights = ops.multiply(scores, decayed, f"{at}weighted{of_head}")
        known = ops.attend(new.keys[key], states[head], f"{at}known{of_head}")
        known = ops.multiply(known, start, f"{at}known_left{of_head}")
        missing = ops.subtract(value, known, f"{at}missing{of_head}")
        target = ops.multiply(missing, strength, f"{at}wanted{of_head}")
        corrections.append(
            Corrections(
                target=target,
                system=ops.multiply(weights, strength, f"{at}system{of_head}"),
            )
        )
        decays.append((decayed, start))
    if ops.by_row:
        rows_seen = _correct_by_row(ops, rule, layer, corrections)
    else:
        rows_seen = [_correct_together(ops, rule, layer, corrections)]
    seen = [ops.split(rows, widths) for rows in rows_seen]
    outputs = []
    for head in range(rule.value_heads):
        key, of_head = head // rule.group, f".h{head}"
        scores = ops.scores(new.queries[key], keys[key], f"{at}scores.h{key}")
        weights = ops.multiply(scores, decays[head][0], f"{at}weights{of_head}")
        begun = ops.attend(new.queries[key], states[head], f"{at}held{of_head}")
        begun = ops.multiply(begun, decays[head][1], f"{at}held_left{of_head}")
        added = _added(ops, weights, [rows[head] for rows in seen], f"{at}added{of_head}")
        outputs.append(ops.add(begun, added, f"{at}output{of_head}"))
    return outputs


def _correct_together(ops: DeltaOps[V], rule: DeltaRule, layer: int, corrections: list[Corrections[V]]) -> V:
    """The cached rows d of all heads, past and new; the new ones from one system for each head."""
    at, rows, tensor = f"layers.{layer}.delta.", [], KvTensor(layer, "delta_value", 0)
    past = ops.split(ops.stored(tensor), [rule.value_dim] * rule.value_heads)
    for head, of in enumerate(corrections):
        known_name = f"{at}known_tail.h{head}"
        known = ops.attend(ops.columns(of.system, 0), past[head], known_name)
        rest = ops.subtract(of.target, known, f"{at}rest.h{head}")
        rows.append(solve(ops, ops.new_columns(of.system), rest, at + "correction"))
        ops.observe_known(of.target, rows[-1], known_name)
    return ops.append_to_cache(ops.join(rows, at + "correction"), tensor)


def _correct_by_row(ops: DeltaOps[V], rule: DeltaRule, layer: int, corrections: list[Corrections[V]]) -> list[V]:
    """The same token by token: for each new token, the rows up to its own."""
    at, tensor = f"layers.{layer}.delta.", KvTensor(layer, "delta_value", 0)
    widths = [rule.value_dim] * rule.value_heads
    new_rows, seen, rows = list[V](), list[V](), ops.stored(tensor)
    for row in range(ops.new_rows):
        if new_rows:
            rows = ops.extended(rows, new_rows[-1], tensor)
            seen.append(rows)
        parts = []
        for head, before in enumerate(ops.split(rows, widths)):
            of = corrections[head]
            known = ops.attend(ops.columns(ops.row(of.system, row), row), before, f"{at}known_tail.h{head}")
            parts.append(ops.subtract(ops.row(of.target, row), known, at + "correction"))
        new_rows.append(ops.join(parts, at + "correction"))
    return [*seen, ops.append_to_cache(ops.together(new_rows, at + "correction"), tensor)]


def solve(ops: DeltaOps[V], system: V, target: V, name: str) -> V:
    """The d with `d_i + sum over j < i of system_ij d_j = target_i`, `[1, 1, AR, width]`.

    By inverses of blocks of 1, 2, 4, ... rows, each from two of half its size: of X, the inverses of all blocks, and M,
    what `system` has between the two halves of the next larger ones, those are `X - X M X`. Their elements stay near 1,
    where powers of the system (Neumann's series) reach 1e12 if keys resemble each other. On and above its diagonal,
    `system` is not read.
    """
    inverse, size = None, 1
    while size < ops.new_rows:
        between = ops.between_blocks(system, size)
        if inverse is None:
            inverse = ops.from_identity(between, name + "_inverse")
        else:
            half = ops.attend(between, inverse, name + "_half")
            inverse = ops.subtract(inverse, ops.attend(inverse, half, name + "_change"), name + "_inverse")
        size *= 2
    return target if inverse is None else ops.attend(inverse, target, name)


def _convolved(ops: DeltaOps[V], rule: DeltaRule, layer: int, channels: V) -> V:
    """Queries, keys and values after their causal convolution."""
    at = f"layers.{layer}.delta."
    rows = ops.append_to_cache(channels, KvTensor(layer, "conv", 0))
    total, *products = (ops.tap(rows, delta_kernel(layer), tap, f"{at}tap{tap}") for tap in range(rule.kernel))
    for tap, product in enumerate(products, 1):
        total = ops.add(total, product, f"{at}sum{tap}")
    return ops.shift(total, delta_kernel_bias(layer), at + "convolved") if rule.kernel_bias else total
