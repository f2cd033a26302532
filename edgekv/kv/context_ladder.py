"""From the graphs of one context to those of the next larger one, over the same buffers."""

from __future__ import annotations

from dataclasses import dataclass

from edgekv.errors import ContextFullError
from edgekv.kv.window import Window


@dataclass(frozen=True, slots=True)
class LadderWindow:
    """What a step sees of one layer.

    Attributes:
        context: S of the graph that runs the step.
        window: rows of this layer's tensors. They differ between layers of which one has grown and the other has not.
    """

    context: int
    window: Window


@dataclass(frozen=True, slots=True)
class ContextLadder:
    """Graphs for several contexts on one strip for each tensor: the past of a shorter context is the tail of a longer.

        row    0                      S-1                      2S-1        (S: the context the strip is made for)
               |      left padding     | token 0, 1, 2, ...     |
           the graph of S reads up to here: [S-1+held-(S-AR), S-1+held)
           the graph of a smaller S' reads its last S'-AR rows alone: [S-1+held-(S'-AR), S-1+held)

    Moving to the next graph copies nothing. With strips made for the largest context nothing is ever copied. Strips
    may also grow: one graph reads all layers, so all need their larger strip when it first runs; but a larger strip
    serves the smaller graph as well, so layers change one after the other in the tokens before.

    Attributes:
        contexts: S of the graphs, ascending.
        layers: decoder layers.
        spacing_tokens: tokens between the growth of one layer and of the next; 0 lets all grow at once, when they
            must; None makes every strip for the largest context from the start.
    """

    contexts: tuple[int, ...]
    layers: int
    spacing_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.contexts or self.contexts[0] < 2 or list(self.contexts) != sorted(set(self.contexts)):
            raise ValueError(f"contexts: found {self.contexts}; wanted ascending numbers from 2 on")
        if self.layers < 1 or (self.spacing_tokens or 0) < 0:
            raise ValueError(f"ladder: found {self}; wanted at least 1 layer, and a spacing from 0 on")
        room = min(b - a for a, b in zip((0, *self.contexts), self.contexts, strict=False))
        if (needed := self.layers * (self.spacing_tokens or 0)) > room:
            raise ValueError(f"spacing_tokens: found {needed} tokens for all layers; wanted at most {room}")

    def context_of(self, columns: int) -> int:
        """S of the graph for a step of AR tokens, where `columns` is the tokens held + AR: the least that has room.

        Raises:
            ContextFullError: not even the largest has.
        """
        for context in self.contexts:
            if columns <= context:
                return context
        raise ContextFullError(
            f"contexts of {', '.join(map(str, self.contexts))} tokens",
            found=f"{columns} tokens",
            wanted=f"at most {self.contexts[-1]}",
            way_out="Choose the policy sliding-window, or export with a larger --context.",
        )

    def strip_context(self, layer: int, columns: int) -> int:
        """The context that the layer's strip is made for in such a step."""
        if self.spacing_tokens is None:
            return self.contexts[-1]
        early = (self.layers - 1 - layer) * self.spacing_tokens
        return next((context for context in self.contexts if columns <= context - early), self.contexts[-1])

    def rows(self, layer: int, tokens: int) -> int:
        """Rows of the layer's strip: S-1 of left padding and S tokens."""
        return 2 * self.strip_context(layer, tokens) - 1

    def home(self, layer: int, tokens: int) -> int:
        """The row of the oldest token, S-1."""
        return self.strip_context(layer, tokens) - 1

    def window(self, home: int, held: int, ar: int) -> LadderWindow:
        """Where the next step reads and writes.

        Args:
            home: the row of the layer's oldest token. A strip never shrinks, so it may be that of a context larger
                than this step asks for.
            held: tokens held before the step.
            ar: tokens per inference.

        Raises:
            ContextFullError: the largest context has no room.
            ValueError: the strip is made for a smaller context than the step needs.
        """
        context = self.context_of(held + ar)
        if home < context - 1:
            raise ValueError(f"home: found row {home}; wanted at least {context - 1}, a strip for {context} tokens")
        past_rows, head = context - ar, home + held
        return LadderWindow(
            context, Window(ar, past_rows, head - past_rows, head, True, max(0, past_rows - held), past_rows)
        )
