"""Tokens of two runs on the CPU, whose sums may be added up in another order."""

from __future__ import annotations

from collections.abc import Sequence

import edgekv

_MOST_STEPS = 17  # two logits, each 8.5 steps of its integers away from where the other order puts it


def assert_same_or_tied(
    found: Sequence[int], expected: Sequence[int], before: Sequence[int], model: edgekv.Model
) -> None:
    """Equal, or else the two candidates at the first difference are nearer to each other than the order of a sum tells.

    Args:
        found: what one run chose behind `before`.
        expected: what the other one chose.
        before: the tokens that both began with.
        model: for the logits.
    """
    assert len(found) == len(expected)
    differing = [at for at, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    if not differing:
        return
    at = differing[0]
    logits = model.score([*before, *expected[:at]])[-1]
    gap = abs(logits[found[at]] - logits[expected[at]]) / model.bundle.manifest.encodings["logits"].scale
    assert gap <= _MOST_STEPS, f"token {at}: {found[at]} or {expected[at]}, {gap:.1f} steps apart"
