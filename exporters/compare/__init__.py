"""Two models on one text, side by side: a bundle, a checkpoint, a GGUF file, or a folder of another runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.lazy import lazy

if TYPE_CHECKING:
    from exporters.compare.comparison import Comparison, Side, compare
    from exporters.compare.contender import Contender, Described
    from exporters.compare.opened import ContenderOptions, open_contender
    from exporters.compare.plan import ComparePlan
    from exporters.compare.show import comparison_lines

__all__ = [
    "Comparison",
    "ComparePlan",
    "Contender",
    "ContenderOptions",
    "Described",
    "Side",
    "compare",
    "comparison_lines",
    "open_contender",
]

__getattr__ = lazy(
    __name__,
    {
        "comparison": "Comparison Side compare",
        "contender": "Contender Described",
        "opened": "ContenderOptions open_contender",
        "plan": "ComparePlan",
        "show": "comparison_lines",
    },
)
