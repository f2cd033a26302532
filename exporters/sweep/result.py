"""The answer of a sweep, as typed records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from edgekv.bundle import QualityRecord
from edgekv.kv import KvDtype
from edgekv.plan import Estimate
from edgekv.spec import Role
from exporters.inspect.report import LayerLoss
from exporters.inspect.tally import Evaluation
from exporters.sweep.combination import Refusal

_MIN_KL = 1e-9
_MIN_BEND = 0.1
_SAME_BYTES = 1.005


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A combination that was exported and measured.

    Attributes:
        name: of its bundle.
        recipe: as it was given.
        rotation: that replaces the recipe's; None for its own.
        kv: integer type of the cache.
        device: the chip.
        contexts: of its graphs.
        splits: number of parts that was asked for.
        bundle: path of the bundle.
        bytes: of the bundle, without binaries.
        ram_bytes: weights, cache and activations at run time.
        tokens_per_s: decode expected on the chip, lowest and highest.
        roofline_tokens_per_s: at the peak bandwidth of the chip's DRAM, with a full cache.
        export_seconds: of its pieces, shared ones in full: the time of a separate export on one worker.
        evaluation: quality.
        quality: what the export measured at its end: on prose, on a chat, and on the tokens of its template.
        layers: error of each layer.
        command: reproduces the bundle.
        simulated: speed by the HTP compiler's simulation; None if it was not asked for, or no simulated chip stands for
            this one.
        on_front: no other of this chip and these contexts has less KL divergence in as few bytes, to 0.5 %.
    """

    name: str
    recipe: str
    rotation: str | None
    kv: KvDtype
    device: str
    contexts: list[int]
    splits: int | None
    bundle: str
    bytes: int
    ram_bytes: int
    tokens_per_s: tuple[float, float]
    roofline_tokens_per_s: float
    export_seconds: float
    evaluation: Evaluation
    layers: list[LayerLoss]
    command: str
    quality: tuple[QualityRecord, ...] = ()
    simulated: Estimate | None = None
    on_front: bool = False

    def simulated_speed(self, role: Role) -> str:
        """Simulated tokens a second of a role's graph, over all proxies; a dash if they are not known."""
        speeds = None if self.simulated is None else self.simulated.span(role)
        if speeds is None:
            return "-"
        low, high = (f"{speed:,.0f}" for speed in speeds)
        return low if low == high else f"{low} to {high}"

    def lost_on(self, text: Literal["prose", "chat", "template"]) -> str:
        """KL divergence on a text that the export measured, in nats a token; a dash if it did not."""
        return next((f"{record.kl_nats:.2g}" for record in self.quality if record.text == text), "-")


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """The combination of least KL divergence within the budget, for a chip, and where the front bends.

    Attributes:
        device: the chip.
        name: of the combination; None if none is small enough.
        command: reproduces it.
        reason: in words.
        knee: name of the combination where the front of quality against bytes bends the most, whatever the budget; None
            if it does not bend.
    """

    device: str
    name: str | None
    command: str | None
    reason: str
    knee: str | None = None


class SweepReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `edgekv sweep`.

    Attributes:
        checkpoint: its path or id.
        text: name of the text.
        budget_bytes: the most that a bundle may have; None for no limit.
        pieces: number of pieces of the whole sweep.
        separate_pieces: what they would be if nothing were shared.
        done: pieces that this run did; the others were finished before.
        seconds: wall time of this run.
        results: in the order of the combinations.
        refused: invalid combinations.
        failed: combinations of which a piece failed.
        recommended: for each chip.
    """

    checkpoint: str
    text: str
    budget_bytes: int | None
    pieces: int
    separate_pieces: int
    done: int
    seconds: float
    results: list[Result]
    refused: list[Refusal]
    failed: list[Refusal]
    recommended: list[Recommendation]


def with_front(results: Sequence[Result]) -> list[Result]:
    """The results with the front marked, for each chip and its contexts: none has less KL divergence in fewer bytes."""
    return [
        msgspec.structs.replace(result, on_front=not any(_dominates(other, result) for other in results))
        for result in results
    ]


def recommend(results: Sequence[Result], budget_bytes: int | None) -> list[Recommendation]:
    """A recommendation for each chip: the least KL divergence within the budget, that is, the largest bundle of use."""
    recommendations = []
    for device in dict.fromkeys(result.device for result in results):
        of_device = [result for result in results if result.device == device]
        fitting = [result for result in of_device if budget_bytes is None or result.bytes <= budget_bytes]
        bend = knee(of_device)
        name = None if bend is None else bend.name
        if not fitting:
            least = min(of_device, key=lambda result: result.bytes)
            reason = f"none within the budget; the smallest is {least.name} with {least.bytes:,} bytes"
            recommendations.append(Recommendation(device=device, name=None, command=None, reason=reason, knee=name))
            continue
        best = min(fitting, key=lambda result: (result.evaluation.kl_nats, result.bytes))
        limit = "of all, as no budget is given" if budget_bytes is None else f"of the {len(fitting)} within the budget"
        reason = f"least KL divergence {limit}: {best.evaluation.kl_nats:.5f} nats a token"
        recommendations.append(
            Recommendation(device=device, name=best.name, command=best.command, reason=reason, knee=name)
        )
    return recommendations


def knee(results: Sequence[Result]) -> Result | None:
    """Where the front of KL divergence, on a logarithmic axis, against bytes bends the most.

    That is the combination furthest below the line between the smallest and the best one, both axes scaled to the
    distance of these two (as in Satopaa et al. 2011, "Finding a Kneedle in a Haystack").

    Returns:
        None if no combination is further below the line than a tenth of an axis.
    """
    front = [result for result in results if not any(_dominates(other, result, in_all=True) for other in results)]
    if len(front) < 3:
        return None
    smallest, best = min(front, key=lambda result: result.bytes), max(front, key=lambda result: result.bytes)
    if smallest.bytes == best.bytes:
        return None

    def depth(result: Result) -> float:
        along = (result.bytes - smallest.bytes) / (best.bytes - smallest.bytes)
        fallen = (_log_kl(smallest) - _log_kl(result)) / (_log_kl(smallest) - _log_kl(best))
        return fallen - along

    bend = max(front, key=depth)
    return bend if depth(bend) > _MIN_BEND else None


def _log_kl(result: Result) -> float:
    return math.log(max(result.evaluation.kl_nats, _MIN_KL))


def _dominates(one: Result, other: Result, *, in_all: bool = False) -> bool:
    """Whether one result makes another useless; `in_all`: also one with other contexts.

    A larger cache type changes a bundle by some bytes of its manifest: such sizes are the same.
    """
    if not in_all and (one.device, one.contexts) != (other.device, other.contexts):
        return False
    nats, other_nats = one.evaluation.kl_nats, other.evaluation.kl_nats
    if nats == other_nats:
        return one.bytes < other.bytes
    return nats < other_nats and one.bytes <= other.bytes * _SAME_BYTES
