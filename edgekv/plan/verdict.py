"""Whether a model fits a device, what would fit, and what else matters, in a few sentences."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from devices import Device
from edgekv.plan.cache import Recommendation
from edgekv.plan.cost import ExportCost
from edgekv.plan.parts import PROTOBUF_BYTES, Part
from edgekv.plan.roofline import Roofline


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in the address space of one HTP context.

    Attributes:
        weights_bytes: all weights, the embedding table too.
        cache_bytes: as the update strategy holds it.
        activations_bytes: of the graph of the largest AR.
        context_bytes: what one context holds.
    """

    weights_bytes: int
    cache_bytes: int
    activations_bytes: int
    context_bytes: int

    @property
    def used_bytes(self) -> int:
        """All three together."""
        return self.weights_bytes + self.cache_bytes + self.activations_bytes

    @property
    def fits(self) -> bool:
        """Whether one context holds them."""
        return self.used_bytes <= self.context_bytes


class PlanVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer.

    Attributes:
        fits: whether the model with this context fits one HTP context and its graphs fit a protobuf.
        text: the answer in words, with what would fit if it does not.
        largest_context: the largest multiple of the largest AR that fits and that the model was made for, or None.
    """

    fits: bool
    text: str
    largest_context: int | None


def make_plan_verdict(
    demand: Demand,
    *,
    device: Device,
    context: int,
    largest_context: int | None,
    longest: int | None,
    with_u8: bool,
    parts: Sequence[Part] | None,
    strategy: Recommendation,
    export: ExportCost,
    speed: Roofline,
) -> PlanVerdict:
    """Put the answer into words.

    Args:
        demand: bytes in one context.
        device: the target.
        context: S.
        largest_context: the largest that fits, or None.
        longest: the longest that the model was made for, if that is known.
        with_u8: whether a cache of 8 bits would make it fit.
        parts: what export divides the graphs into, or None if no division would do.
        strategy: what the cache is planned with.
        export: what exporting it takes.
        speed: how fast it can be.
    """
    small_enough = export.graph_bytes <= PROTOBUF_BYTES
    fits = demand.fits and small_enough
    where = f"on {device.soc} (V{device.arch}) with a context of {context:,}"
    sums = (
        f"{gb(demand.weights_bytes)} of weights, {gb(demand.cache_bytes)} of cache ({strategy.strategy}) and "
        f"{gb(demand.activations_bytes)} of activations, of {gb(demand.context_bytes)} in one HTP context"
    )
    lines = [f"It {'fits' if fits else 'does not fit'} {where}: {sums}."]
    if not small_enough:
        lines.append(f"A graph of {gb(export.graph_bytes)} is above the {gb(PROTOBUF_BYTES)} of a protobuf.")
    if not demand.fits:
        lines.append(_way_out(demand, largest_context, with_u8, parts))
    elif largest_context is not None and largest_context > context:
        limit = "the longest that the model was made for" if largest_context == longest else "the largest that fits"
        lines.append(f"So does a context of {largest_context:,}, {limit}.")
    if parts is not None and len(parts) > 1:
        most = gb(max(part.compile_peak_bytes for part in parts))
        lines.append(f"Export divides it into {len(parts)} parts, each compiled in {most} of RAM at most.")
    lines.append(
        f"At best {speed.tokens_per_s:.0f} tokens a second. The export takes about {gb(export.peak_bytes)} of RAM and "
        f"{duration(export.seconds)}."
    )
    return PlanVerdict(fits=fits, text=" ".join(lines), largest_context=largest_context)


def _way_out(demand: Demand, largest_context: int | None, with_u8: bool, parts: Sequence[Part] | None) -> str:
    ways = []
    if largest_context is not None:
        ways.append(f"--context {largest_context} (the largest that fits)")
    if with_u8:
        ways.append("--kv u8")
    if parts is not None:
        ways.append(f"the model parted over {len(parts)} contexts, as export does by itself")
    else:
        ways.append("a smaller model: a single part of this one is above one context")
    alone = "The weights alone are too large. " if demand.weights_bytes > demand.context_bytes else ""
    return f"{alone}What would fit: {'; or '.join(ways)}."


def gb(size_bytes: int) -> str:
    """In 10^9 bytes, or in 10^6 below a tenth of that."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
