"""Copies of an update strategy in an endless generation, in closed form.

The context policy is sliding-window: layers that attend to W tokens keep the newest W-1 rows. The tests compare every
figure with a running cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from edgekv.kv import KINDS, Geometry, Layout, state_strip
from edgekv.plan.cache.choices import Choice
from edgekv.spec.geometry import CHECKPOINT_TOKENS


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


def count_traffic(choice: Choice, geometry: Geometry, context: int, max_ar: int) -> Traffic:
    """The copies of one group of layers.

    Args:
        choice: the update strategy.
        geometry: of layers that attend to the same number of tokens, W.
        context: S of the graphs.
        max_ar: the largest AR of the graphs.
    """
    if geometry.is_delta:
        return _tail_traffic(geometry, context, max_ar)
    if geometry.is_state:
        return _state_traffic(choice, geometry, context, max_ar)
    held, tokens = geometry.past_rows(1), context - 1
    if choice.strategy == "slot":
        # A step of AR copies its AR rows. Before it, at most AR-1 newest rows behind the graph's past are exchanged
        # with the oldest: three copies of each pair.
        hidden = max(0, held - geometry.past_rows(max_ar, context))
        return Traffic(0, tokens, Fraction(1), max_ar + 3 * hidden, 0)
    if choice.strategy == "shift-concat":
        return Traffic(0, tokens * held, Fraction(held), held, 0)
    if choice.strategy == "mirror":
        return Traffic(None, 0, Fraction(0), 0, 2)
    # pointer-shift: the window reaches the end of the strip every `between` tokens; then all held rows move down.
    between = choice.make(geometry, max_ar).rows - held
    slides = (tokens - 1) // between
    partial = min(slides, held // between)
    filling = between * partial * (partial + 1) // 2 + (slides - partial) * held
    return Traffic(between, filling, Fraction(held, between), held, 2)


def _state_traffic(choice: Choice, geometry: Geometry, context: int, max_ar: int) -> Traffic:
    """The copies of states: `slot` moves the state itself, and the new rows to its tail; others, the tail of a text."""
    if choice.strategy == "slot":
        kernel = geometry.context
        return Traffic(0, (context - 1) * kernel, Fraction(kernel), max_ar + kernel - 1, 0)
    # Rows are counted, whose type is no matter; those of keys and values have no u16.
    strip = replace(state_strip(geometry, max_ar), kinds=KINDS, kv_dtype="s16")
    traffic = count_traffic(choice, strip, context, max_ar)
    if choice.strategy != "shift-concat":
        return traffic
    tokens, held, state = context - 1, strip.past_rows(1), geometry.context - 1
    growing = sum(max(each, state) for each in range(1, min(tokens, held) + 1))
    return replace(traffic, filling_rows=growing + max(0, tokens - held) * held)


def _tail_traffic(geometry: Geometry, context: int, max_ar: int) -> Traffic:
    """The copies of the tail of a delta rule: each new row, and 64 rows at each checkpoint; none of its matrices."""
    if geometry.kinds == ("recurrent",):
        return Traffic(None, 0, Fraction(0), 0, 0)
    tokens = context - 1
    filling = tokens + tokens // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS
    return Traffic(0, filling, Fraction(2), min(max_ar, CHECKPOINT_TOKENS) + CHECKPOINT_TOKENS, 0)


def count_addresses(choice: Choice, geometry: Geometry, max_ar: int, ar: int) -> int:
    """Number of distinct start rows of past and new rows of the AR-`ar` graph in an endless generation.

    A runtime that registers each address of an input or output as a separate tensor registers this many per cache
    tensor.
    """
    if geometry.is_delta:
        return 2
    geometry = state_strip(geometry, max_ar) if geometry.is_state else geometry
    layout = Layout.of(geometry, choice.make(geometry, max_ar))
    if choice.strategy == "mirror":
        return 2 * layout.rows
    if choice.strategy == "pointer-shift":
        return 2 * (layout.rows - ar - geometry.past_rows(1) + 1)
    return 2
