"""Whether a context fits, and the largest one that does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from devices import Device
from edgekv.errors import UsageError
from edgekv.kv import Geometry
from edgekv.plan.cache.strategies import Choice
from edgekv.plan.cache.subject import Subject

# A limit met in the field, not a documented one: an HTP process context addresses 4 GB, less what the runtime takes.
HTP_CONTEXT_BYTES = 3_750_000_000


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory for weights and cache together.

    Attributes:
        total_bytes: how much; above 0.
        basis: where the figure is from, for readers.
    """

    total_bytes: int
    basis: str

    def __post_init__(self) -> None:
        if self.total_bytes < 1:
            raise ValueError(f"total_bytes: got {self.total_bytes}; expected at least 1")

    @classmethod
    def of_htp(cls) -> Budget:
        """The address space of one process context."""
        return cls(HTP_CONTEXT_BYTES, "HTP virtual address space of one context, a limit met in the field")

    @classmethod
    def of_option(cls, gigabytes: float) -> Budget:
        """What `--budget-gb` says, in 10^9 bytes.

        Raises:
            UsageError: not a finite number above 0.
        """
        if not 1e-9 <= gigabytes < float("inf"):
            raise UsageError("--budget-gb", got=gigabytes, expected="a number above 0", fix="Use --budget-gb 3.75.")
        return cls(round(gigabytes * 1e9), "--budget-gb")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for the default strategy; each strategy has its own beside its costs.

    Attributes:
        text: the answer in words.
        fits: whether weights and cache of the context asked for fit the budget.
        strategy: the strategy that this is about.
        context: the context asked for.
        largest_context: the largest one that fits and that export accepts, or None if none does.
        context_multiple: export accepts multiples of this, the largest AR.
        model_context: the longest context that the model was made for, if it is known; no limit of memory.
        cache_bytes: the cache of the context asked for.
        weights_bytes: the weights, or None if they are unknown; then they count as 0 bytes.
        budget_bytes: memory for both.
        budget_basis: where that figure is from.
        device: part number of the device, if one was named.
    """

    text: str
    fits: bool
    strategy: str
    context: int
    largest_context: int | None
    context_multiple: int
    model_context: int | None
    cache_bytes: int
    weights_bytes: int | None
    budget_bytes: int
    budget_basis: str
    device: str | None


def check_cache_type(geometry: Geometry, device: Device) -> None:
    """Refuse a cache that the device's HTP does not multiply by.

    Raises:
        UsageError: a 16-bit cache before V73.
    """
    if not device.supports_kv(geometry.kv_dtype):
        raise UsageError(
            "--device",
            got=f"{device.soc} (V{device.arch}) for a cache of {8 * geometry.element_bytes} bits",
            expected="V73 or later for a cache of 16 bits",
            fix="Use --kv-bits 8 (export with --kv u8), or a later device.",
        )


def fits(choice: Choice, subject: Subject, budget: Budget) -> bool:
    """Whether weights and cache together are within the budget."""
    return _room_bytes(subject, budget) >= choice.held_bytes(subject.geometry, subject.ar)


def largest_context(choice: Choice, subject: Subject, budget: Budget) -> int | None:
    """The largest multiple of the largest AR, above it, whose cache fits; None if not even the smallest does."""
    room_bytes = _room_bytes(subject, budget)

    def is_within(context: int) -> bool:
        return choice.held_bytes(replace(subject.geometry, context=context), subject.ar) <= room_bytes

    return largest_multiple(subject.ar[-1], is_within)


def largest_multiple(step: int, is_within: Callable[[int], bool]) -> int | None:
    """The largest multiple of `step`, from twice it on, that is within; None if twice it is not.

    Args:
        step: at least 1.
        is_within: true up to some number and false from there on.
    """
    least = 2
    if not is_within(least * step):
        return None
    most = 2 * least
    while is_within(most * step):
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if is_within(middle * step) else (least, middle)
    return least * step


def make_verdict(choices: Sequence[Choice], subject: Subject, budget: Budget, device: Device | None) -> Verdict:
    """The verdict for the first choice; the others are named as a way out if it does not fit."""
    first, *others = choices
    geometry = subject.geometry
    verdict = Verdict(
        text="",
        fits=fits(first, subject, budget),
        strategy=first.label,
        context=geometry.context,
        largest_context=largest_context(first, subject, budget),
        context_multiple=subject.ar[-1],
        model_context=subject.max_positions,
        cache_bytes=first.held_bytes(geometry, subject.ar),
        weights_bytes=subject.weights_bytes,
        budget_bytes=budget.total_bytes,
        budget_basis=budget.basis,
        device=None if device is None else device.soc,
    )
    fitting = [choice.label for choice in others if not verdict.fits and fits(choice, subject, budget)]
    text = _text(verdict, fitting, device)
    return msgspec.structs.replace(verdict, text=text)


def _room_bytes(subject: Subject, budget: Budget) -> int:
    return budget.total_bytes - (subject.weights_bytes or 0)


def _text(verdict: Verdict, fitting: Sequence[str], device: Device | None) -> str:
    where = "" if device is None else f" on {device.soc} (V{device.arch})"
    outcome = "fits" if verdict.fits else "does not fit"
    weights = "unknown weights" if verdict.weights_bytes is None else f"{_size(verdict.weights_bytes)} of weights"
    budget = f"{_size(verdict.budget_bytes)} ({verdict.budget_basis})"
    lines = [
        f"A context of {verdict.context:,} {outcome}{where} with {verdict.strategy}: "
        f"{_size(verdict.cache_bytes)} of cache and {weights}, of {budget}."
    ]
    if fitting:
        lines.append(f"It fits with {' or '.join(fitting)}.")
    multiple = f"(multiples of {verdict.context_multiple}, the largest AR)"
    if verdict.largest_context is None:
        lines.append(f"No context fits {multiple}.")
    else:
        lines.append(f"The largest context that fits is {verdict.largest_context:,} {multiple}.")
    if verdict.model_context is not None:
        lines.append(f"The model itself was made for {verdict.model_context:,} (max_position_embeddings).")
    if (verdict.weights_bytes or 0) > verdict.budget_bytes:
        lines.append("The weights alone are too large for one context: split the model over several.")
    return " ".join(lines)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.3f} MB"
