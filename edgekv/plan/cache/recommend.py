"""Which update strategy to choose, and why."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from devices import Device
from edgekv.plan.cache.strategies import StrategySize


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


def recommend(sizes: Sequence[StrategySize], device: Device | None) -> Recommendation:
    """The strategy to choose among those that fit the budget, or among all if none does or there is no budget.

    On an HTP each address of a graph's input or output is registered as a tensor of its own when the model loads, so
    the fewest addresses come first (ExecuTorch's issue 4517 counted 55,444 of them; its issue 7614 is about the time
    that they take). Without a device addresses are taken to be free, so the fewest copied bytes come first. Ties go
    to the fewer copied bytes, then to the less memory.
    """
    among = [size for size in sizes if size.fits] or list(sizes)
    by_address, by_copies = min(among, key=_addresses_first), min(among, key=_copies_first)
    best, other = (by_copies, by_address) if device is None else (by_address, by_copies)
    text = _on_host(best, other) if device is None else _on_htp(best, other, device)
    if any(size.fits is not None for size in sizes) and not any(size.fits for size in sizes):
        text = f"none fits; {text}"
    return Recommendation(strategy=best.strategy, reserve=best.reserve, reason=f"{best.label}: {text}.")


def _copied(size: StrategySize) -> tuple[float, float]:
    return (size.filling_bytes_per_token, size.sliding_bytes_per_token)


def _addresses_first(size: StrategySize) -> tuple[float, ...]:
    return (size.registered_addresses, *_copied(size), size.held_bytes)


def _copies_first(size: StrategySize) -> tuple[float, ...]:
    return (*_copied(size), size.held_bytes)


def _on_htp(best: StrategySize, other: StrategySize, device: Device) -> str:
    text = f"{best.registered_addresses:,} addresses to register when the model loads on {device.soc}"
    if best is other:
        return f"{text}, and no other copies less"
    return (
        f"{text}, where {other.label}, which copies least, has {other.registered_addresses:,}; the price is "
        f"{best.filling_bytes_per_token:,.0f} bytes copied a token"
    )


def _on_host(best: StrategySize, other: StrategySize) -> str:
    until = "" if best.tokens_before_copy is None else f" until {best.tokens_before_copy:,} tokens are held"
    least = f"{best.filling_bytes_per_token:,.0f} bytes copied a token{until}"
    if best is other:
        return f"{least}, and no other copies less"
    return (
        f"{least}, where {other.label} copies {other.filling_bytes_per_token:,.0f} from the start. No device is named, "
        f"so addresses are taken to cost nothing: where binding {best.rebound_tensors_per_step:,} tensors anew at each "
        f"step is dear, choose {other.label}"
    )
