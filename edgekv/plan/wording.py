"""Sizes, durations and answers in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from devices import Device
    from edgekv.plan.cache import Choice
    from edgekv.plan.fit import Demand, Fit
    from edgekv.plan.parts import EncoderPlan
    from edgekv.plan.subject import Subject


def fit_sentences(
    subject: Subject,
    choice: Choice,
    device: Device | None,
    needed: Demand,
    memory_fit: Fit,
    alternatives: Sequence[str],
) -> list[str]:
    """Says whether a context fits, alternatives that fit, and the longest context.

    Args:
        choice: the update strategy.
        device: the target, if one was named.
        needed: bytes that the strategy needs.
        memory_fit: whether it fits.
        alternatives: options that would make it fit.
    """
    outcome = "fits" if memory_fit.fits else "does not fit"
    if device is not None:
        outcome += f" on {device.soc} (V{device.arch})"
    basis = needed.limit_basis
    divided = memory_fit.fits and not memory_fit.in_one
    if divided:
        outcome, basis = f"{outcome}, divided over {memory_fit.contexts} HTP contexts", f"{basis} each"
    sentences = [
        f"A context of {subject.geometry.context:,} {outcome}, with {choice.label}: {_pieces(needed)}, of "
        f"{gb(needed.limit_bytes)} ({basis})."
    ]
    if not memory_fit.fits:
        sentences.append(_alternatives(subject, memory_fit, alternatives))
    elif memory_fit.largest_context is not None and memory_fit.largest_context > subject.geometry.context:
        sentences.append(_longest(subject, memory_fit.largest_context))
    if divided and memory_fit.largest_in_one is not None:
        sentences.append(f"Undivided, a context of up to {memory_fit.largest_in_one:,} fits.")
    if divided:
        sentences.append(f"The device needs {gb(needed.used_bytes)} of free RAM, which is not checked here.")
    return sentences


def _pieces(needed: Demand) -> str:
    weights = "unknown weights" if needed.weights_bytes is None else f"{gb(needed.weights_bytes)} of weights"
    pieces = [weights, f"{gb(needed.cache_bytes)} of cache"]
    if needed.activations_bytes is not None:
        pieces.append(f"{gb(needed.activations_bytes)} of activations")
    return f"{', '.join(pieces[:-1])} and {pieces[-1]}"


def _longest(subject: Subject, context: int) -> str:
    longest = subject.max_positions
    is_own = longest is not None and longest - context < subject.ar[-1]
    return f"So does a context of {context:,}, the longest that {'the model was made for' if is_own else 'fits'}."


def _alternatives(subject: Subject, memory_fit: Fit, options: Sequence[str]) -> str:
    ways = [*options]
    if memory_fit.largest_context is not None:
        ways.insert(0, f"--context {memory_fit.largest_context} (the longest that fits)")
    if ways:
        return f"It fits with {' or '.join(ways)}."
    return f"No context fits (multiples of {subject.ar[-1]}, the largest AR). Use a smaller model."


def encoder_sentence(encoder: EncoderPlan) -> str:
    """What a vision encoder takes, and what it gives."""
    return (
        f"Its vision encoder takes {gb(encoder.used_bytes)} in an HTP context of its own; a tile of "
        f"{encoder.image} x {encoder.image} pixels becomes {encoder.tokens} tokens."
    )


def gb(size_bytes: int) -> str:
    """In 10^9 bytes, or in 10^6 below 10^8 bytes."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def duration_span(low_s: float, high_s: float) -> str:
    """Two durations, such as `76 ms to 0.21 s`."""
    first, last = duration(low_s), duration(high_s)
    return first if first == last else f"{first} to {last}"


def span(low: float, high: float) -> str:
    """Two figures of two digits, such as `9.1 to 23`."""
    first, last = (f"{value:,.0f}" if value >= 10 else f"{value:.2g}" for value in (low, high))
    return first if first == last else f"{first} to {last}"
