"""Memory that grows with the text, and the token at which each layer's memory is reallocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from edgekv.errors import UsageError
from edgekv.kv.memory import Allocate, HeapMemory
from edgekv.kv.strategies import GROWING_STRATEGIES
from edgekv.spec.geometry import LayerSpec, RowSpec

GrowthName = Literal["staggered", "together"]
GROWTHS: tuple[GrowthName, ...] = ("staggered", "together")


@dataclass(frozen=True, slots=True)
class Growth:
    """The memory of a layer grows from one context to the next.

    One graph reads all layers, so all need memory for its context when it first runs. But memory for a larger
    context serves the smaller graph as well, so the layers can be reallocated one at a time over the preceding tokens:

        tokens   0               128             256                             512
        layer 0  | 128   | 256           | 512                                   |
        layer 1  | 128           | 256           | 512                           |

    Attributes:
        contexts: the sizes in tokens, ascending; the last is S of the largest graphs.
        name: `staggered` spreads the layers evenly over the tokens from one context to the next; `together` reallocates
            all layers when they are outgrown.
    """

    contexts: tuple[int, ...]
    name: GrowthName = "staggered"

    def __post_init__(self) -> None:
        if not self.contexts or self.contexts[0] < 2 or list(self.contexts) != sorted(set(self.contexts)):
            raise ValueError(f"contexts: got {self.contexts}; expected ascending numbers from 2 on")
        if len(self.contexts) == 1:
            raise UsageError(
                "growth",
                got=f"one context, of {self.contexts[0]} tokens",
                expected="several: a graph reads rows of its whole context, whether they hold a token or not",
                fix="Leave it out, or export with several, as --context 512,1024,4096.",
            )

    def check(self, geometries: Sequence[RowSpec], context: int, max_ar: int, strategy: str) -> None:
        """Reject a cache that cannot grow like this.

        Args:
            geometries: of its layers with attention.
            context: S of the largest graphs.
            max_ar: the most tokens per inference.
            strategy: by name.

        Raises:
            ValueError: growth to another context, or from a context below the tokens of a step.
            UsageError: another strategy, or two layers that would grow at the same token.
        """
        if self.contexts[-1] != context or self.contexts[0] <= max_ar:
            raise ValueError(f"growth: got {self.contexts}; expected contexts up to {context}, all above AR-{max_ar}")
        if strategy not in GROWING_STRATEGIES:
            names = " or ".join(GROWING_STRATEGIES)
            fix = f"Use {names}, or leave growth out."
            raise UsageError(f"growth {self.name}", got=strategy, expected=f"the update strategy {names}", fix=fix)
        layers = sum(geometry.layers for geometry in geometries if geometry.window == context)
        steps = [above - below for below, above in zip((0, *self.contexts), self.contexts[:-1], strict=False)]
        if self.name == "staggered" and min(steps) < layers:
            raise UsageError(
                "growth staggered",
                got=f"contexts of {', '.join(map(str, self.contexts))} tokens for {layers} layers",
                expected=f"at least {layers} tokens to the next, one for each layer to grow at",
                fix="Use together, or export with contexts that lie farther apart.",
            )

    def context(self, layer: int, layers: int, columns: int) -> int:
        """The context that a layer's memory must fit in a step; `columns` is the tokens held + AR."""
        below = 0
        for context in self.contexts[:-1]:
            early = (context - below) * (layers - 1 - layer) // layers if self.name == "staggered" else 0
            if columns <= context - early:
                return context
            below = context
        return self.contexts[-1]

    def contexts_of(self, layers: int, columns: int) -> Sequence[int]:
        """`context` of all layers."""
        return [self.context(layer, layers, columns) for layer in range(layers)]


@dataclass(frozen=True, slots=True)
class Allocation:
    """Where the memory of a cache comes from, and when.

    Attributes:
        growth: how it grows, for `slot` and `pointer-shift`; None allocates all of it at the start.
        allocate: gives it; `mirror` maps its own.
    """

    growth: Growth | None = None
    allocate: Allocate = HeapMemory


AT_ONCE = Allocation()
"""All of it at the start, from the heap."""


def single_layers(geometries: Sequence[LayerSpec], context: int) -> tuple[LayerSpec, ...]:
    """The same layers, with one geometry for each that attends to the whole context, so that each grows separately."""
    alone: list[LayerSpec] = []
    for geometry in geometries:
        if isinstance(geometry, RowSpec) and geometry.window == context:
            alone += (replace(geometry, layers=1, numbers=(n,)) for n in geometry.numbers or range(geometry.layers))
        else:
            alone.append(geometry)
    return tuple(alone)


def parse_growth(name: str, contexts: Sequence[int]) -> Growth:
    """A growth by name, over these contexts.

    Raises:
        UsageError: no such growth, or a single context.
    """
    for known in GROWTHS:
        if name == known:
            return Growth(tuple(contexts), known)
    names = " or ".join(GROWTHS)
    raise UsageError("growth", got=repr(name), expected=names, fix=f"Use {names}, or leave it out.")
