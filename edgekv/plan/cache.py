"""The cost of a KV cache: bytes held and copied by each update strategy, graph inputs and outputs; which to choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import singledispatch

import msgspec

from edgekv.kv import (
    DEFAULT_RESERVE,
    DEFAULT_STRATEGY,
    STRATEGIES,
    Layout,
    Strategy,
    StrategyName,
    allocated_bytes,
    make_strategy,
    state_strip,
)
from edgekv.spec import (
    CHECKPOINT_TOKENS,
    ConvSpec,
    DecoderInterface,
    DeltaSpec,
    Geometry,
    GraphRecord,
    LayerSpec,
    Role,
    RotaryInputs,
    RowSpec,
)

_POINTER_SHIFT: StrategyName = "pointer-shift"
_RESERVES = (DEFAULT_RESERVE, Fraction(3, 2))


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy as a user picks it.

    Attributes:
        strategy: its name.
        reserve: the reserve, for those that have one.
    """

    strategy: StrategyName
    reserve: Fraction | None = None

    @property
    def label(self) -> str:
        """Such as `pointer-shift 1.5`."""
        return self.strategy if self.reserve is None else f"{self.strategy} {float(self.reserve)}"

    def make(self, geometry: RowSpec, max_ar: int) -> Strategy:
        """The strategy itself, empty, as the runtime creates it for layers with attention."""
        return make_strategy(self.strategy, geometry, max_ar=max_ar, reserve=self.reserve or DEFAULT_RESERVE)

    def held_bytes(self, geometry: Geometry, ar: Sequence[int]) -> int:
        """Bytes that a cache for graphs of these AR allocates."""
        return sum(self._group_bytes(group, ar, geometry.context) for group in geometry.groups())

    def layer_bytes(self, geometry: Geometry, ar: Sequence[int]) -> tuple[int, ...]:
        """Bytes of each layer, rounded up."""
        layer_bytes = [0] * geometry.layers
        for group in geometry.groups():
            share = -(-self._group_bytes(group, ar, geometry.context) // group.layers)
            for layer in group.numbers or range(group.layers):
                layer_bytes[layer] += share
        return tuple(layer_bytes)

    def formula_bytes(self, geometry: Geometry) -> int | None:
        """Bytes by the formula of Qualcomm's HTP note; None for other strategies.

        reserve x 2 x layers x heads x (S-1) x D x bits/8: the note writes 2 x 2 for a reserve of 2.0, and 3 for 1.5.
        """
        if self.reserve is None:
            return None
        rows_bytes = sum(group.tensors * group.past_rows(1) * group.row_bytes for group in geometry.rows())
        return int(self.reserve * rows_bytes)

    def _group_bytes(self, group: LayerSpec, ar: Sequence[int], context: int) -> int:
        return allocated_bytes(group, self.strategy, ar, context, self.reserve or DEFAULT_RESERVE)


def _choices() -> tuple[Choice, ...]:
    names = sorted(STRATEGIES, key=lambda name: name != DEFAULT_STRATEGY)
    return tuple(
        Choice(name, reserve) for name in names for reserve in (_RESERVES if name == _POINTER_SHIFT else (None,))
    )


CHOICES = _choices()
"""Every strategy, the default of `edgekv generate` first."""


class GraphPorts(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs and outputs of one graph.

    Attributes:
        role: `decode` (AR-1); `prefill`, which also has the input `logits_index`; or `verify`.
        ar: tokens per inference.
        inputs: all graph inputs.
        outputs: all graph outputs.
        kv_inputs: past rows of cache tensors, among the inputs.
        kv_outputs: new rows of cache tensors, among the outputs.
    """

    role: str
    ar: int
    inputs: int
    outputs: int
    kv_inputs: int
    kv_outputs: int


def graph_ports(geometry: Geometry, role: Role, ar: int, rotary: Sequence[RotaryInputs]) -> GraphPorts:
    """The ports of the graph for `ar` tokens per inference, as one part."""
    record = GraphRecord.whole("", "", layers=geometry.layers, ar=ar, context=geometry.context, role=role)
    # All heads of a layer have the same ports, so one is enough to count the others.
    cache = replace(geometry, kv_heads=1) if isinstance(geometry, RowSpec) else replace(geometry, kv_heads=(1,))
    ports = DecoderInterface(hidden=1, outputs=1, cache=cache, rotary=tuple(rotary)).graph(record)
    return GraphPorts(
        role=role,
        ar=ar,
        inputs=sum(port.kind not in ("past", "state") for port in ports.inputs) + geometry.tensors,
        outputs=sum(port.kind != "new" for port in ports.outputs) + geometry.tensors,
        kv_inputs=geometry.tensors,
        kv_outputs=geometry.tensors,
    )


def estimate(
    *, layers: int, kv_heads: int, head_dim: int, tokens: int, element_bytes: int = 4, sequences: int = 1
) -> int:
    """Bytes of the keys and values of each token of each sequence: 2 x L x H x D x n x element x sequences.

    Formula and default (float32) are those of ZigLlama's `estimateMemoryUsage`; with grouped-query attention H is the
    number of key/value heads. An update strategy allocates more or fewer rows: see `StrategyCost.held_bytes`.

    Raises:
        ValueError: a size below 1.
    """
    sizes = {
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "tokens": tokens,
        "element_bytes": element_bytes,
        "sequences": sequences,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}: got {value}; expected at least 1")
    return 2 * layers * kv_heads * head_dim * tokens * element_bytes * sequences


@dataclass(frozen=True, slots=True)
class Traffic:
    """Rows copied in each tensor, and addresses of the graphs' cache inputs and outputs.

    Attributes:
        tokens_before_copy: tokens decoded from an empty cache before the first copy; None if there is none.
        filling_rows: total rows copied while the first S-1 tokens are decoded one at a time.
        sliding_rows_per_token: rows copied, mean over the later tokens.
        worst_step_rows: upper bound of the rows copied in one step of any graph.
        moving_ends: number of addresses (input and output of a tensor) that change at each decode step.
    """

    tokens_before_copy: int | None
    filling_rows: int
    sliding_rows_per_token: Fraction
    worst_step_rows: int
    moving_ends: int


@singledispatch
def count_traffic(spec: LayerSpec, choice: Choice, context: int, max_ar: int) -> Traffic:
    """The copies of one group of layers.

    Args:
        spec: of the layers.
        choice: the update strategy.
        context: S of the graphs.
        max_ar: the largest AR of the graphs.
    """
    raise TypeError(f"spec: got {type(spec).__name__}; expected a RowSpec, ConvSpec or DeltaSpec")


@count_traffic.register
def _(spec: RowSpec, choice: Choice, context: int, max_ar: int) -> Traffic:
    held, tokens = spec.past_rows(1), context - 1
    if choice.strategy == "slot":
        # A step of AR copies its AR rows. Before it, at most AR-1 newest rows behind the graph's past are exchanged
        # with the oldest: three copies of each pair.
        hidden = max(0, held - spec.past_rows(max_ar, context))
        return Traffic(0, tokens, Fraction(1), max_ar + 3 * hidden, 0)
    if choice.strategy == "shift-concat":
        return Traffic(0, tokens * held, Fraction(held), held, 0)
    if choice.strategy == "mirror":
        return Traffic(None, 0, Fraction(0), 0, 2)
    # pointer-shift: the window reaches the end of the strip every `between` tokens; then all held rows move down.
    between = choice.make(spec, max_ar).rows - held
    slides = (tokens - 1) // between
    partial = min(slides, held // between)
    filling = between * partial * (partial + 1) // 2 + (slides - partial) * held
    return Traffic(between, filling, Fraction(held, between), held, 2)


@count_traffic.register
def _(spec: ConvSpec, choice: Choice, context: int, max_ar: int) -> Traffic:
    """`slot` moves the state itself, and the new rows to its tail; others, the tail of a text."""
    if choice.strategy == "slot":
        return Traffic(0, (context - 1) * spec.kernel, Fraction(spec.kernel), max_ar + spec.state_rows, 0)
    strip = state_strip(spec, max_ar)
    traffic = count_traffic(strip, choice, context, max_ar)
    if choice.strategy != "shift-concat":
        return traffic
    tokens, held = context - 1, strip.past_rows(1)
    growing = sum(max(token_count, spec.state_rows) for token_count in range(1, min(tokens, held) + 1))
    return replace(traffic, filling_rows=growing + max(0, tokens - held) * held)


@count_traffic.register
def _(spec: DeltaSpec, choice: Choice, context: int, max_ar: int) -> Traffic:
    """Each new row of a tail, and 64 rows at each checkpoint; none of the matrices."""
    if spec.kind == "recurrent":
        return Traffic(None, 0, Fraction(0), 0, 0)
    tokens = context - 1
    filling = tokens + tokens // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS
    return Traffic(0, filling, Fraction(2), min(max_ar, CHECKPOINT_TOKENS) + CHECKPOINT_TOKENS, 0)


@singledispatch
def count_addresses(spec: LayerSpec, choice: Choice, max_ar: int, ar: int) -> int:
    """Number of distinct start rows of past and new rows of the AR-`ar` graph in an endless generation.

    A runtime that registers each address of an input or output as a separate tensor registers this many per cache
    tensor.
    """
    raise TypeError(f"spec: got {type(spec).__name__}; expected a RowSpec, ConvSpec or DeltaSpec")


@count_addresses.register
def _(spec: RowSpec, choice: Choice, max_ar: int, ar: int) -> int:
    layout = Layout.of(spec, choice.make(spec, max_ar))
    if choice.strategy == "mirror":
        in_columns = spec.key_layout == "columns"
        # Keys as columns move on by an element, and new ones are written to one address: the mean of keys and values.
        return -(-(layout.rows * (spec.head_dim + 2) + 1) // 2) if in_columns else 2 * layout.rows
    if choice.strategy == "pointer-shift":
        return 2 * (layout.rows - ar - spec.past_rows(1) + 1)
    return 2


@count_addresses.register
def _(spec: ConvSpec, choice: Choice, max_ar: int, ar: int) -> int:
    return count_addresses(state_strip(spec, max_ar), choice, max_ar, ar)


@count_addresses.register
def _(spec: DeltaSpec, choice: Choice, max_ar: int, ar: int) -> int:
    return 2


class StrategyCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one strategy in an endless generation with the policy sliding-window.

    Attributes:
        strategy: its name.
        reserve: memory of the strip in units of S-1 rows, for those that have one.
        formula_bytes: bytes by the formula of Qualcomm's note, if it has one.
        held_bytes: bytes allocated: whole rows, space for the new rows of the largest AR, 64-byte alignment.
        rows_per_tensor: rows of each tensor of the layers that attend to the whole context.
        scratch_rows_per_tensor: rows of each scratch tensor, for new rows that are copied into the cache afterwards.
        stride_bytes: from one such tensor to the next.
        tokens_before_copy: tokens decoded before the first copy; None if there is none.
        filling_bytes_per_token: bytes copied, mean over the first S-1 tokens.
        sliding_bytes_per_token: bytes copied, mean over the later tokens.
        worst_step_bytes: upper bound of the bytes copied in one step.
        rebound_tensors_per_step: graph inputs and outputs to bind again before each decode step, because their
            address changed.
        registered_addresses: addresses of the cache inputs and outputs of all graphs together. An HTP runtime
            registers each as a tensor of its own, once, when it loads.
        fits: whether the context fits the limit, if one was given.
        largest_context: the longest context that fits; None if none does.
    """

    strategy: str
    reserve: float | None
    formula_bytes: int | None
    held_bytes: int
    rows_per_tensor: int
    scratch_rows_per_tensor: int
    stride_bytes: int
    tokens_before_copy: int | None
    filling_bytes_per_token: float
    sliding_bytes_per_token: float
    worst_step_bytes: int
    rebound_tensors_per_step: int
    registered_addresses: int
    fits: bool | None = None
    largest_context: int | None = None

    @property
    def label(self) -> str:
        """As `Choice.label`."""
        return self.strategy if self.reserve is None else f"{self.strategy} {self.reserve}"


def strategy_cost(choice: Choice, geometry: Geometry, ar: Sequence[int]) -> StrategyCost:
    """The cost of one choice, without saying whether it fits."""
    context, max_ar = geometry.context, max(ar)
    groups = geometry.groups()
    counted = [(group, count_traffic(group, choice, context, max_ar)) for group in groups]
    row_bytes = [group.tensors * group.row_bytes for group in groups]
    extra_bytes = _key_column_bytes(choice, geometry)
    filling = sum(size * traffic.filling_rows for size, (_, traffic) in zip(row_bytes, counted, strict=True))
    sliding = sum(size * traffic.sliding_rows_per_token for size, (_, traffic) in zip(row_bytes, counted, strict=True))
    worst = sum(size * traffic.worst_step_rows for size, (_, traffic) in zip(row_bytes, counted, strict=True))
    starts = [traffic.tokens_before_copy for _, traffic in counted if traffic.tokens_before_copy is not None]
    widest = max(geometry.rows(), key=lambda group: group.window)
    layout = Layout.of(widest, choice.make(widest, max_ar))
    return StrategyCost(
        strategy=choice.strategy,
        reserve=None if choice.reserve is None else float(choice.reserve),
        formula_bytes=choice.formula_bytes(geometry),
        held_bytes=choice.held_bytes(geometry, ar),
        rows_per_tensor=layout.rows,
        scratch_rows_per_tensor=layout.scratch_rows,
        stride_bytes=layout.stride_bytes,
        tokens_before_copy=0 if extra_bytes else min(starts, default=None),
        filling_bytes_per_token=filling / (context - 1) + extra_bytes,
        sliding_bytes_per_token=float(sliding) + extra_bytes,
        worst_step_bytes=worst + max_ar * extra_bytes,
        rebound_tensors_per_step=sum(group.tensors * traffic.moving_ends for group, traffic in counted),
        registered_addresses=sum(
            group.tensors * count_addresses(group, choice, max_ar, step) for group in groups for step in ar
        ),
    )


def _key_column_bytes(choice: Choice, geometry: Geometry) -> int:
    """Bytes that keys as columns add to every token: graphs write new key columns to a scratch first."""
    if geometry.key_layout == "rows" or choice.strategy not in ("pointer-shift", "mirror"):
        return 0
    return sum(group.tensors // 2 * group.row_bytes for group in geometry.rows())


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy, as the options of `edgekv generate` name it.

    Attributes:
        strategy: its name.
        reserve: the reserve, for those that have one.
        reason: why, in a sentence.
    """

    strategy: str
    reserve: float | None
    reason: str


def recommend(costs: Sequence[StrategyCost]) -> Recommendation:
    """The strategy to choose among those that fit the limit, or among all if none does or there is no limit.

    The fewest addresses come first: an HTP runtime registers each as a tensor of its own when it loads (ExecuTorch
    issue 4517 counted 55,444 of them; issue 7614 reports the time), and ONNX Runtime binds every moved tensor again at
    each step. Ties go to the fewest copied bytes, then to the least memory.
    """
    fitting = [cost for cost in costs if cost.fits] or list(costs)
    best, fewest_copies = min(fitting, key=_addresses_first), min(fitting, key=_copies_first)
    reason = f"{best.label}: {_reason(best, fewest_copies)}."
    if any(cost.fits is not None for cost in costs) and not any(cost.fits for cost in costs):
        reason = f"{best.label}, although none fits: {_reason(best, fewest_copies)}."
    return Recommendation(strategy=best.strategy, reserve=best.reserve, reason=reason)


def _addresses_first(cost: StrategyCost) -> tuple[float, ...]:
    return (cost.registered_addresses, *_copies_first(cost))


def _copies_first(cost: StrategyCost) -> tuple[float, ...]:
    return (cost.filling_bytes_per_token, cost.sliding_bytes_per_token, cost.held_bytes)


def _reason(best: StrategyCost, fewest_copies: StrategyCost) -> str:
    text = (
        f"{best.registered_addresses:,} addresses to register, {best.rebound_tensors_per_step:,} tensors to bind again "
        f"at each step, {best.filling_bytes_per_token:,.0f} bytes copied per token"
    )
    if best is fewest_copies:
        return text
    return (
        f"{text}; {fewest_copies.label} copies {fewest_copies.filling_bytes_per_token:,.0f}, but has "
        f"{fewest_copies.registered_addresses:,} addresses and binds {fewest_copies.rebound_tensors_per_step:,} "
        f"tensors at each step"
    )
