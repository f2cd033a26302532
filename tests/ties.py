"""Tokens of two runs on the CPU, whose sums may be added up in another order."""

from __future__ import annotations

from collections.abc import Sequence

import edgekv

SUM_STEPS = 17  # two logits, each 8.5 steps of its integers away from where another order of a sum puts it
ROW_STEPS = 256  # of 65,536: cache rows that were computed in another chunk are some steps apart themselves


def assert_same_or_tied(
    found: Sequence[int],
    expected: Sequence[int],
    before: Sequence[int],
    model: edgekv.Model,
    most_steps: int = SUM_STEPS,
) -> None:
    """Equal, or else the two candidates at the first difference are as good as tied.

    Args:
        found: what one run chose behind `before`.
        expected: what the other one chose.
        before: the tokens that both began with.
        model: for the logits.
        most_steps: steps of the logits' integers that a tie may be apart.
    """
    assert len(found) == len(expected)
    differing = [at for at, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    if not differing:
        return
    at = differing[0]
    logits = model.score([*before, *expected[:at]])[-1]
    gap = abs(logits[found[at]] - logits[expected[at]]) / model.bundle.manifest.encodings["logits"].scale
    assert gap <= most_steps, f"token {at}: {found[at]} or {expected[at]}, {gap:.1f} steps apart"
