"""How fast a decoder would decode on a chip with any type for each matrix: simulated, in a few compiler runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from devices import Device
from edgekv.bundle import GraphRecord
from edgekv.errors import EngineError
from edgekv.plan import Estimate
from edgekv.spec import DecoderInterface, DecoderSpec, matrices
from exporters.estimate.estimate import estimate_spec
from exporters.options import RunOptions
from exporters.progress import Progress, silent
from exporters.quantize.recipe import Recipe, WeightRule
from quant import WeightDtype

_BASE: WeightDtype = "int8"
"""The type beside which the others are timed: all matrices can have it."""


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """The simulated time of a decoded token at the largest context.

    What a type adds to a matrix is measured where all matrices of its form have that type, in a binary of this graph
    alone. Their sum is an estimate, as one unit may wait for another; `us` simulates a whole choice with all graphs in
    one binary, as it ships, where decode is slower.

    Attributes:
        spec: the decoder.
        recipe: of the matrices that get no other type.
        graph: the one that decodes at the largest context.
        graphs: all that ship in its binary.
        interface: of the graphs.
        device: the chip. Of several that stand for it, the slowest counts.
        run: where results are kept.
        progress: called for each compiler run.
    """

    spec: DecoderSpec
    recipe: Recipe
    graph: GraphRecord
    graphs: Sequence[GraphRecord]
    interface: DecoderInterface
    device: Device
    run: RunOptions
    progress: Progress = silent

    def us(self, types: Mapping[str, WeightDtype]) -> float:
        """Microseconds of a token if matrices have these types, by name.

        Raises:
            UsageError: no chip stands for the device.
            EngineError: the compiler is missing or failed, or has no costs for some operation.
        """
        return self._us(types, self.graphs)

    def _us(self, types: Mapping[str, WeightDtype], graphs: Sequence[GraphRecord]) -> float:
        simulated = self._estimate(types, graphs)
        if (us := self._slowest_us(simulated)) is None:
            missing = max(simulated.graphs, key=lambda graph: (graph.graph == self.graph.name, graph.missing_ops))
            raise EngineError(
                "--target-tokens-per-s",
                got=f"{missing.missing_ops} operations without costs on {missing.proxy}",
                expected="a simulated time",
                fix="Leave it out, and choose types with --target-mb or --max-kl.",
            )
        return us

    def times(self, possible: Mapping[str, Sequence[WeightDtype]]) -> dict[str, dict[WeightDtype, float]]:
        """Microseconds that each possible type adds to a token, by matrix; beside int8 for all of them.

        A type with which some operation has no costs is left out.

        Args:
            possible: the types that matrices can have, by name.

        Raises:
            UsageError: no chip stands for the device.
            EngineError: the compiler is missing or failed, or has no costs with int8.
        """
        base = dict.fromkeys(possible, _BASE)
        base_us, saved = self._us(base, [self.graph]), {name: {_BASE: 0.0} for name in possible}
        for names in _alike(self.spec, possible):
            for dtype in possible[names[0]]:
                us = self._slowest_us(self._estimate({**base, **dict.fromkeys(names, dtype)}, [self.graph]))
                if us is not None and dtype != _BASE:
                    for name in names:
                        saved[name][dtype] = (us - base_us) / len(names)
        return saved

    def _estimate(self, types: Mapping[str, WeightDtype], graphs: Sequence[GraphRecord]) -> Estimate:
        rules = [WeightRule(tensors=name, dtype=dtype, method="nearest") for name, dtype in types.items()]
        recipe = msgspec.structs.replace(self.recipe, weights=(*self.recipe.weights, *rules), ends=None)
        run, progress = self.run, self.progress
        return estimate_spec(self.spec, recipe, graphs, self.interface, self.device, run, progress=progress)

    def _slowest_us(self, estimate: Estimate) -> float | None:
        """On the slowest of the chips that stand for the device; None if some operation has no costs."""
        estimates = [graph for graph in estimate.graphs if graph.graph == self.graph.name]
        return None if any(graph.missing_ops for graph in estimates) else max(graph.us for graph in estimates)


def _alike(spec: DecoderSpec, possible: Mapping[str, Sequence[WeightDtype]]) -> list[list[str]]:
    """Names of matrices that do the same in their layers, and have one shape."""
    shapes, groups = matrices(spec), dict[tuple[str, tuple[int, ...], tuple[WeightDtype, ...]], list[str]]()
    for name, types in possible.items():
        role = re.sub(r"\.\d+\.", ".", name)
        groups.setdefault((role, tuple(shapes[name]), tuple(types)), []).append(name)
    return [*groups.values()]
