"""Buffers that grow when the context is not known: how many rows each layer has at which token, in integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import gcd
from typing import Protocol


class Growth(Protocol):
    """Says how many rows the tensors of each layer have.

    A layer that grows gets new buffers and copies its rows into them. The old ones stay until the step ends: what
    was queued on an accelerator before may still read them. So every layer that grows in a step is held twice.
    """

    @property
    def layers(self) -> int:
        """Decoder layers."""

    def rows(self, layer: int, tokens: int) -> int:
        """Rows of each tensor of the layer in the step that brings the tokens held to `tokens`."""

    def home(self, layer: int, tokens: int) -> int:
        """The row of the oldest token in that step."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Layer i has first_rows[i] rows, and step_rows[i] more whenever they are used up.

    Attributes:
        first_rows: what each layer starts with; at least 1.
        step_rows: what each layer grows by; at least 1.
    """

    first_rows: tuple[int, ...]
    step_rows: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.first_rows or len(self.first_rows) != len(self.step_rows):
            raise ValueError(f"steps: found {self}; wanted as many first sizes as steps, and at least one layer")
        if min(*self.first_rows, *self.step_rows) < 1:
            raise ValueError(f"steps: found {self}; wanted at least 1 row")

    @classmethod
    def equal(cls, layers: int, step_rows: int = 128, known_tokens: int = 0) -> Steps:
        """All layers alike, so that all of them grow in the same step.

        Args:
            layers: decoder layers.
            step_rows: rows that are allocated ahead.
            known_tokens: tokens that are certain to come, as of a prompt; the first buffers have room for them.
        """
        return cls((known_tokens + step_rows,) * layers, (step_rows,) * layers)

    @classmethod
    def staggered(cls, layers: int, step_rows: int = 128, known_tokens: int = 0) -> Steps:
        """One layer after the other, evenly spread: no two ever grow at the same token.

        The first sizes differ by step_rows / layers from layer to layer, and equal steps keep that distance for
        ever. Steps that differ throughout, as in OpenVINO's GPU plugin, meet at their common multiples.

        Raises:
            ValueError: fewer rows in a step than layers: two of them would have to grow at once.
        """
        if step_rows < layers:
            raise ValueError(f"step_rows: found {step_rows}; wanted at least {layers}, one token for each layer")
        first = tuple(known_tokens + step_rows * (layer + 1) // layers for layer in range(layers))
        return cls(first, (step_rows,) * layers)

    @classmethod
    def drifting(cls, layers: int, step_rows: int = 128, known_tokens: int = 0) -> Steps:
        """Every layer with a step of its own, step_rows + layer, as in OpenVINO's GPU plugin (`kv_cache.cpp`)."""
        steps = tuple(step_rows + layer for layer in range(layers))
        return cls(tuple(known_tokens + step for step in steps), steps)

    @property
    def layers(self) -> int:
        return len(self.first_rows)

    @property
    def never_together(self) -> bool:
        """Whether no two layers grow at the same token, however long the generation.

        a + k*s = b + l*t has a solution in integers k and l exactly if gcd(s, t) divides a - b. That k and l may be
        kept positive follows by adding multiples of the steps.
        """
        pairs = combinations(zip(self.first_rows, self.step_rows, strict=True), 2)
        return all((first - other) % gcd(step, stride) for (first, step), (other, stride) in pairs)

    def rows(self, layer: int, tokens: int) -> int:
        first, step = self.first_rows[layer], self.step_rows[layer]
        return first + max(0, -(-(tokens - first) // step)) * step

    def home(self, layer: int, tokens: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class GrowthReport:
    """The memory of a generation, token by token, of which this is the worst.

    Attributes:
        peak_bytes: the most that lives at once.
        peak_tokens: tokens held at the end of the step where that is so, the first such step.
        steady_bytes: what lives at the end.
        excess_bytes: the most that lives at once only because layers are growing.
        grown: how often a layer grew.
        most_layers: the most layers that grew in one step.
        copied_bytes: what growing copied.
    """

    peak_bytes: int
    peak_tokens: int
    steady_bytes: int
    excess_bytes: int
    grown: int
    most_layers: int
    copied_bytes: int


def report_growth(growth: Growth, row_bytes: Sequence[int], tokens: int, *, known_tokens: int = 0) -> GrowthReport:
    """What a generation of single-token steps costs, exactly.

    Args:
        growth: how buffers grow.
        row_bytes: for each layer, bytes of one token's rows in all tensors of the layer.
        tokens: tokens held at the end.
        known_tokens: tokens of the prompt; buffers are first allocated for it.

    Raises:
        ValueError: not one `row_bytes` for each layer, or an end before the prompt's.
    """
    if len(row_bytes) != growth.layers or not 0 <= known_tokens <= tokens:
        found = f"{len(row_bytes)} row_bytes, {known_tokens} to {tokens} tokens"
        raise ValueError(f"growth: found {found}; wanted {growth.layers} row_bytes, and tokens after the prompt")
    rows = [growth.rows(layer, known_tokens) for layer in range(growth.layers)]
    steady = sum(count * each for count, each in zip(rows, row_bytes, strict=True))
    peak, peak_tokens, worst_excess, grown, most, copied = steady, known_tokens, 0, 0, 0, 0
    for count in range(known_tokens + 1, tokens + 1):
        wanted = [growth.rows(layer, count) for layer in range(growth.layers)]
        if wanted == rows:
            continue
        growing = [layer for layer in range(growth.layers) if wanted[layer] != rows[layer]]
        excess = sum(rows[layer] * row_bytes[layer] for layer in growing)
        steady += sum((wanted[layer] - rows[layer]) * row_bytes[layer] for layer in growing)
        if steady + excess > peak:
            peak, peak_tokens = steady + excess, count
        worst_excess = max(worst_excess, excess)
        grown += len(growing)
        most = max(most, len(growing))
        copied += sum((count - 1) * row_bytes[layer] for layer in growing)
        rows = wanted
    return GrowthReport(peak, peak_tokens, steady, worst_excess, grown, most, copied)
