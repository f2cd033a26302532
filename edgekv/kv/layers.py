"""Models whose layers differ, and the groups of layers that do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgekv.kv.geometry import Geometry, KeyLayout, KvDtype


@dataclass(frozen=True, slots=True)
class LayeredGeometry:
    """A cache whose layers differ in key/value heads, width of a head, or how many tokens they attend to.

    Each list is repeated when it is shorter than the layers, so one number holds for all and (512, 512, 4096) makes
    every third layer a global one.

    Attributes:
        layers: decoder layers.
        context: S, the tokens that the widest layers attend to, the last one included.
        kv_heads: key/value heads by layer.
        head_dim: D by layer.
        windows: tokens that a layer attends to, itself included. More than S means S: there never are more.
        kv_dtype: see `Geometry`.
        key_layout: see `Geometry`.
    """

    layers: int
    context: int
    kv_heads: Sequence[int]
    head_dim: Sequence[int]
    windows: Sequence[int] = ()
    kv_dtype: KvDtype = "u8"
    key_layout: KeyLayout = "rows"

    def __post_init__(self) -> None:
        for name in ("kv_heads", "head_dim"):
            if not getattr(self, name):
                raise ValueError(f"{name}: found an empty list; wanted a number at least")
        if all(self._window(layer) < self.context for layer in range(self.layers)):
            raise ValueError(f"context: found {self.context}; wanted {max(self.windows)}, the widest layer's window")
        self.groups()

    def groups(self) -> tuple[Geometry, ...]:
        """Layers of the same heads, width and window together, in the order of their first layers."""
        found: dict[tuple[int, int, int], list[int]] = {}
        for layer in range(self.layers):
            sizes = (
                self.kv_heads[layer % len(self.kv_heads)],
                self.head_dim[layer % len(self.head_dim)],
                self._window(layer),
            )
            found.setdefault(sizes, []).append(layer)
        groups = [
            Geometry(len(numbers), kv_heads, head_dim, window, self.kv_dtype, self.key_layout, tuple(numbers))
            for (kv_heads, head_dim, window), numbers in found.items()
        ]
        # All layers in one group are what a plain geometry says.
        return tuple(groups) if len(groups) > 1 else (replace(groups[0], numbers=()),)

    def _window(self, layer: int) -> int:
        return min(self.windows[layer % len(self.windows)], self.context) if self.windows else self.context
