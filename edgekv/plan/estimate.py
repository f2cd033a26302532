"""Speed on the HTP as Qualcomm's compiler simulates it, and how to find what makes such estimates.

Simulating needs the compiler and builders of graphs, which this package does not: an installed package offers it as an
entry points of the group `edgekv.estimators`: `bundle` and `config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from devices import Device, find
from edgekv.errors import EngineError
from edgekv.spec import Role

if TYPE_CHECKING:
    from edgekv.bundle import Bundle
    from edgekv.plan.options import PlanOptions

GROUP = "edgekv.estimators"
EQUAL_SHARE = 0.08
"""Times that differ by less are called equal: the simulation is no finer."""


class GraphEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated speed of a graph on one proxy.

    Attributes:
        graph: its name.
        role: what it is for; "encoder" of a vision encoder.
        ar: tokens per inference; of an encoder, rows of a tile.
        context: S, tokens; 0 of an encoder.
        proxy: part number of the simulated chip.
        us: microseconds of a run, all parts together.
        low_us: the lower estimate.
        high_us: the upper estimate.
        tokens_per_s: AR tokens in that time; None if the figures are void.
        moved_bytes: between DRAM and VTCM.
        gb_per_s: that over the time, 10^9 bytes a second.
        bound: the busiest unit: memory, HVX, HMX, or the thread that issues operations.
        busy: the share of time that each unit is busy.
        spilled_bytes: intermediate results that do not fit the VTCM.
        missing_ops: operations without costs; above 0, all figures are void.
        parts: the share of time of each part of the model, largest first. Each moment is divided among the operations
            that compute then; where none does, among transfers.
        operations: the share of time of each kind of operation, largest first.
    """

    graph: str
    role: Role | Literal["encoder"]
    ar: int
    context: int
    proxy: str
    us: float
    low_us: float
    high_us: float
    tokens_per_s: float | None
    moved_bytes: int
    gb_per_s: float
    bound: str
    busy: dict[str, float]
    spilled_bytes: int
    missing_ops: int
    parts: dict[str, float]
    operations: dict[str, float]


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated speed of a decoder on a chip, and of its vision encoder. Nothing was measured.

    Attributes:
        source: name of the bundle, or path of the `config.json`.
        device: part number of the chip.
        proxies: part numbers of the chips that stand for it.
        compiler: the package that simulates, with its version.
        vtcm_mb: tightly coupled memory that graphs may use, MiB.
        optimization: level of the compiler.
        is_sliced: whether times are sums of slices of layers.
        graphs: each graph on each proxy.
        notes: how far to trust it.
    """

    source: str
    device: str
    proxies: list[str]
    compiler: str
    vtcm_mb: int
    optimization: int
    is_sliced: bool
    graphs: list[GraphEstimate]
    notes: list[str]

    def span(self, role: Role) -> tuple[float, float] | None:
        """Tokens a second of the graph of a role with the most tokens in the longest context, over all proxies.

        Returns:
            The lowest and the highest; None if there is no such graph, or one is void.
        """
        graphs = [graph for graph in self.graphs if graph.role == role]
        if not graphs:
            return None
        largest = max((graph.context, graph.ar) for graph in graphs)
        speeds = [graph.tokens_per_s for graph in graphs if (graph.context, graph.ar) == largest]
        known = [speed for speed in speeds if speed is not None]
        return (min(known), max(known)) if len(known) == len(speeds) else None


class ConfigEstimator(Protocol):
    """Simulates the graphs that a checkpoint would have, from its `config.json` alone."""

    def __call__(self, path: Path, device: Device, graphs: PlanOptions) -> Estimate: ...


class BundleEstimator(Protocol):
    """Simulates the graphs of a bundle."""

    def __call__(self, bundle: Bundle, device: Device) -> Estimate: ...


def estimate(bundle: str | Path, device: str) -> Estimate:
    """How fast a bundle would be on a chip, as Qualcomm's compiler simulates it. Nothing is measured.

    Args:
        device: part number or name of the chip, such as SM8650.

    Raises:
        UsageError: no chip that the compiler simulates stands for this one, or the graphs are not for the HTP.
        BundleError: the bundle is damaged.
        EngineError: the packages that simulate are not installed, or the compiler failed.
        devices.UnknownDeviceError: an unknown device.
    """
    from edgekv.bundle import open_bundle

    estimator: BundleEstimator = _load("bundle", "estimate")
    return estimator(open_bundle(Path(bundle)), find(device))


def find_estimator() -> ConfigEstimator:
    """What an installed package offers for a `config.json`.

    Raises:
        EngineError: none is installed, or it cannot be imported.
    """
    estimator: ConfigEstimator = _load("config", "--estimate")
    return estimator


def _load(name: str, field: str) -> Any:
    fix = 'Install it: pip install "edgekv[export,htp]"'
    points = metadata.entry_points(group=GROUP, name=name)
    if not points:
        raise EngineError(field, got="no estimator", expected="the compiler's simulation", fix=fix)
    try:
        return next(iter(points)).load()
    except ImportError as error:
        raise EngineError(field, got=str(error), expected="the compiler's simulation", fix=fix) from None


def compared(estimate: Estimate, against: Estimate | None) -> Iterator[tuple[GraphEstimate, GraphEstimate | None, str]]:
    """Each graph, the one of another bundle for the same AR and context, and how their times compare, in words."""
    for graph in estimate.graphs:
        use = (graph.role, graph.ar, graph.context, graph.proxy)
        others = () if against is None else against.graphs
        other = next(
            (
                candidate
                for candidate in others
                if (candidate.role, candidate.ar, candidate.context, candidate.proxy) == use
            ),
            None,
        )
        if other is None or other.tokens_per_s is None or graph.tokens_per_s is None:
            yield graph, other, "-"
        else:
            yield graph, other, _verdict(graph.us, other.us)


def _verdict(us: float, other_us: float) -> str:
    if abs(us - other_us) < EQUAL_SHARE * max(us, other_us):
        return "equal"
    return f"{other_us / us:.2f} x as fast" if us < other_us else f"{us / other_us:.2f} x slower"
