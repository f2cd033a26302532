"""Whether a model fits in a chip's memory, and what to do if not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from devices import Device
from edgekv.errors import UsageError
from edgekv.plan.cache import Choice
from edgekv.plan.export_cost import layer_graph_bytes
from edgekv.plan.options import HTP_CONTEXT_BYTES, MAX_CONTEXT
from edgekv.plan.parts import Load, Part, are_runnable, lay_out, min_splits, smallest_parts
from edgekv.plan.subject import Subject
from edgekv.spec.layers import Geometry
from edgekv.spec.sizes import Decoder

MASK_BYTES = 1 << 20
"""The largest mask operand that is reported to be right."""

_ELEMENT_BYTES = 2  # every activation is uint16
_REPORTED_ARCH = 81


def mask_bytes(geometry: Geometry, ar: int) -> int:
    """Bytes of the largest mask operand of the AR-`ar` graph; each attention window has its own mask."""
    columns = max(group.past_rows(ar, geometry.context) for group in geometry.rows()) + ar
    return _ELEMENT_BYTES * ar * columns


def mask_warnings(geometry: Geometry, ar: Sequence[int], device: Device) -> list[str]:
    """A sentence for each graph whose mask is above `MASK_BYTES`, with the AR to use instead.

    Args:
        geometry: of the cache for the longest context.
        ar: tokens per inference of each graph.
    """
    context = geometry.context
    where = (
        f"HTP V{device.arch}" if device.arch == _REPORTED_ARCH else f"HTP V{_REPORTED_ARCH} (other versions: unknown)"
    )
    sentences = []
    for tokens in ar:
        safe = _safe_ar(geometry, tokens)
        fix = f"Use --ar with {safe} instead of {tokens}" if safe else "No AR is small enough: use a smaller --context"
        if (mask_size := mask_bytes(geometry, tokens)) > MASK_BYTES:
            sentences.append(
                f"AR-{tokens} with a context of {context:,} has an attention mask of {mask_size:,} bytes; above "
                f"{MASK_BYTES:,} the Add of {where} is reported to use wrong rows, which the emulator does not show. "
                f"{fix}."
            )
    return sentences


def _safe_ar(geometry: Geometry, ar: int) -> int | None:
    """The largest smaller AR that divides the context and has a mask within the limit, if there is one."""
    context = geometry.context
    smaller = (tokens for tokens in range(ar - 1, 0, -1) if context % tokens == 0)
    return next((tokens for tokens in smaller if mask_bytes(geometry, tokens) <= MASK_BYTES), None)


def activation_bytes(decoder: Decoder, geometry: Geometry, ar: int) -> int:
    """Bytes that the largest layer of the AR-`ar` graph needs at once: an upper estimate.

    It assumes that nothing is freed within either half of a layer, and that all heads run at once:

    * in both: residual and normalized residual `2 [AR, hidden]`, masks `[AR, P+AR]`, logits of one row `[vocab]`;
    * attention: scores and probabilities of every query head `2 heads [AR, P+AR]`, and concatenated past and new rows
    for each kv head: keys, transposed keys, values `3 kv_heads [P+AR, D]`, in the cache's own type; * feed-forward, if
    it needs more: gate, up and their product `3 [AR, intermediate]`.

    P is S-AR past rows, or fewer in layers with an attention window. The HTP compiler works in tiles in its own memory
    and spills the rest; its schedule is not modelled.
    """
    context = geometry.context
    attending = geometry.rows()
    columns = [group.past_rows(ar, context) + ar for group in attending]
    both_halves = 2 * ar * decoder.hidden + ar * sum(columns) + decoder.result_width
    joined_bytes = max(
        3 * group.kv_heads * rows * group.row_bytes for group, rows in zip(attending, columns, strict=True)
    )
    attention_bytes = _ELEMENT_BYTES * 2 * decoder.heads * ar * max(columns) + joined_bytes
    feed_forward_bytes = _ELEMENT_BYTES * 3 * ar * decoder.intermediate
    return _ELEMENT_BYTES * both_halves + max(attention_bytes, feed_forward_bytes)


_MAX_GIGABYTES = 1e6


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory for weights, cache and activations.

    Attributes:
        total_bytes: limit in bytes; above 0.
        basis: source of the figure, as text.
        per_context: whether it is the limit of one HTP context, over several of which export divides a model.
    """

    total_bytes: int
    basis: str
    per_context: bool = False

    def __post_init__(self) -> None:
        if self.total_bytes < 1:
            raise ValueError(f"total_bytes: got {self.total_bytes}; expected at least 1")

    @classmethod
    def of_htp(cls) -> MemoryLimit:
        """The address space of one HTP context."""
        return cls(HTP_CONTEXT_BYTES, "one HTP context", per_context=True)

    @classmethod
    def of_option(cls, gigabytes: float) -> MemoryLimit:
        """The budget of `--budget-gb`, in 10^9 bytes.

        Raises:
            UsageError: not a number from 10^-9 to 10^6.
        """
        if not 1e-9 <= gigabytes <= _MAX_GIGABYTES:
            expected = "a number above 0, at most 1000000"
            raise UsageError("--budget-gb", got=gigabytes, expected=expected, fix="Use --budget-gb 3.75.")
        return cls(round(gigabytes * 1e9), "--budget-gb")


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one strategy needs, and the limit.

    Attributes:
        weights_bytes: all weights including the embedding table, or None if they are unknown.
        cache_bytes: as the update strategy holds it.
        activations_bytes: of the graph of the largest AR, or None if they are unknown.
        limit_bytes: memory for all three.
        limit_basis: source of the limit.
    """

    weights_bytes: int | None
    cache_bytes: int
    activations_bytes: int | None
    limit_bytes: int
    limit_basis: str

    @property
    def used_bytes(self) -> int:
        """The sum of all three; unknown sizes count as 0."""
        return (self.weights_bytes or 0) + self.cache_bytes + (self.activations_bytes or 0)


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a model fits with one strategy.

    Attributes:
        fits: whether it fits, if necessary divided over several HTP contexts.
        in_one: whether it fits undivided.
        contexts: HTP contexts of the parts that export makes, 1 for any other limit; None if it does not fit. Export
            also divides what fits undivided if compiling it whole needs too much RAM.
        largest_context: the longest context that fits: a multiple of the largest AR, at most the model's own longest
            and 2^20; None if none fits.
        largest_in_one: the longest that fits undivided.
    """

    fits: bool
    in_one: bool
    contexts: int | None
    largest_context: int | None
    largest_in_one: int | None


def check_cache_type(geometry: Geometry, device: Device) -> None:
    """Reject a cache that the device's HTP does not support.

    Raises:
        UsageError: a 16-bit cache before V73.
    """
    if not device.supports_kv(geometry.kv_dtype):
        raise UsageError(
            "--device",
            got=f"{device.soc} (V{device.arch}) for a cache of {8 * geometry.rows()[0].element_bytes} bits",
            expected="V73 or later for a cache of 16 bits",
            fix="Use --kv-bits 8 (export with --kv u8), or a later device.",
        )


def demand(subject: Subject, choice: Choice, limit: MemoryLimit) -> Demand:
    """The bytes that the model needs with one strategy."""
    decoder, geometry = subject.decoder, subject.geometry
    return Demand(
        weights_bytes=subject.weights_bytes,
        cache_bytes=choice.held_bytes(geometry, subject.steps),
        activations_bytes=None if decoder is None else activation_bytes(decoder, geometry, subject.steps[-1]),
        limit_bytes=limit.total_bytes,
        limit_basis=limit.basis,
    )


def divide_model(subject: Subject, choice: Choice) -> tuple[Part, ...] | None:
    """The parts of an export or of the bundle; None if a part is too large for an HTP context.

    Raises:
        ValueError: the sizes or the weights of the model are unknown.
    """
    load = _load(subject, choice)
    splits = min_splits(load) if subject.splits is None else subject.splits
    parts = () if splits is None else lay_out(load, splits)
    return parts if parts and are_runnable(parts) else None


def fit(subject: Subject, choice: Choice, limit: MemoryLimit) -> Fit:
    """Whether the model fits with one strategy, and how long a context may be."""
    longest = MAX_CONTEXT if subject.max_positions is None else min(subject.max_positions, MAX_CONTEXT)

    def fits_with(context: int, *, divided: bool) -> bool:
        if context > longest:
            return False
        return _fits(replace(subject, geometry=subject.geometry.in_context(context)), choice, limit, divided)

    contexts = None
    if _fits(subject, choice, limit, divided=True):
        parts = divide_model(subject, choice) if _is_divisible(subject, limit) else None
        contexts = len(parts) if parts else 1
    return Fit(
        fits=contexts is not None,
        in_one=_fits(subject, choice, limit, divided=False),
        contexts=contexts,
        largest_context=largest_multiple(subject.ar[-1], partial(fits_with, divided=True)),
        largest_in_one=largest_multiple(subject.ar[-1], partial(fits_with, divided=False)),
    )


def largest_multiple(step: int, is_within: Callable[[int], bool]) -> int | None:
    """The largest multiple of `step`, at least twice it, that is within; None if there is none.

    Args:
        step: at least 1.
        is_within: true up to some number and false above it.
    """
    fitting = 2
    if not is_within(fitting * step):
        return None
    too_long = 2 * fitting
    while is_within(too_long * step):
        fitting, too_long = too_long, 2 * too_long
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        fitting, too_long = (middle, too_long) if is_within(middle * step) else (fitting, middle)
    return fitting * step


def _is_divisible(subject: Subject, limit: MemoryLimit) -> bool:
    return limit.per_context and subject.decoder is not None and subject.weights is not None


def _fits(subject: Subject, choice: Choice, limit: MemoryLimit, divided: bool) -> bool:
    """Whether the limit, or one HTP context for each part if it is divided, holds the model."""
    if not divided or not _is_divisible(subject, limit):
        return demand(subject, choice, limit).used_bytes <= limit.total_bytes
    load = _load(subject, choice)
    return are_runnable(smallest_parts(load) if subject.splits is None else lay_out(load, subject.splits))


def _load(subject: Subject, choice: Choice) -> Load:
    decoder, weights, geometry = subject.decoder, subject.weights, subject.geometry
    if decoder is None or weights is None:
        raise ValueError("subject: got a model of unknown sizes; expected a decoder and its weights")
    return Load(
        layers=weights.layer_bytes,
        packed=weights.packed_bytes,
        embedding_bytes=weights.embedding_bytes,
        head_bytes=weights.head_bytes,
        packed_head_bytes=weights.packed_head_bytes,
        cache=choice.layer_bytes(geometry, subject.steps),
        activations_bytes=activation_bytes(decoder, geometry, subject.steps[-1]),
        layer_graph_bytes=layer_graph_bytes(decoder),
        graphs=len(subject.graphs),
        boundary=decoder.first_without_cache,
    )
