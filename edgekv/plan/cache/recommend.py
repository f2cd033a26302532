"""Which update strategy to choose, and why."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edgekv.plan.cache.strategy_cost import StrategyCost


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
