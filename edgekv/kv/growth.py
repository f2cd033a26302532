"""Memory that grows with the text: for how many tokens each layer's memory is made at which token, in integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edgekv.errors import UsageError

GrowthName = Literal["staggered", "together"]
GROWTHS: tuple[GrowthName, ...] = ("staggered", "together")


@dataclass(frozen=True, slots=True)
class Growth:
    """The memory of a layer is made for one context after the other.

    One graph reads all layers, so all need memory for its context when it first runs. But memory for a larger
    context serves the smaller graph as well, so the layers may change one after the other in the tokens before:

        tokens   0               128             256                             512
        layer 0  | 128   | 256           | 512                                   |
        layer 1  | 128           | 256           | 512                           |

    Attributes:
        contexts: what memory is made for, ascending; the last is S of the largest graphs.
        name: `staggered` spreads the layers evenly over the tokens from one context to the next; `together` lets all
            grow when they must.
    """

    contexts: tuple[int, ...]
    name: GrowthName = "staggered"

    def __post_init__(self) -> None:
        if not self.contexts or self.contexts[0] < 2 or list(self.contexts) != sorted(set(self.contexts)):
            raise ValueError(f"contexts: found {self.contexts}; wanted ascending numbers from 2 on")
        if len(self.contexts) == 1:
            raise UsageError(
                "growth",
                found=f"one context, of {self.contexts[0]} tokens",
                wanted="several: a graph reads rows of its whole context, whether they hold a token or not",
                way_out="Leave it out, or export with several, as --context 512,1024,4096.",
            )

    def check(self, layers: int) -> None:
        """Refuse layers of which two would grow at the same token.

        Raises:
            UsageError: `staggered`, and a context is fewer tokens above the one before than there are layers.
        """
        steps = [above - below for below, above in zip((0, *self.contexts), self.contexts[:-1], strict=False)]
        if self.name == "staggered" and min(steps) < layers:
            raise UsageError(
                "growth staggered",
                found=f"contexts of {', '.join(map(str, self.contexts))} tokens for {layers} layers",
                wanted=f"at least {layers} tokens to the next, one for each layer to grow at",
                way_out="Use together, or export with contexts that lie farther apart.",
            )

    def context(self, layer: int, layers: int, columns: int) -> int:
        """What the memory of a layer is made for in a step, where `columns` is the tokens held + AR."""
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


def parse_growth(name: str, contexts: Sequence[int]) -> Growth:
    """A growth by name, over these contexts.

    Raises:
        UsageError: no such growth, or a single context.
    """
    for known in GROWTHS:
        if name == known:
            return Growth(tuple(contexts), known)
    names = " or ".join(GROWTHS)
    raise UsageError("growth", found=repr(name), wanted=names, way_out=f"Use {names}, or leave it out.")
