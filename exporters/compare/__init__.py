"""Two models on one text, side by side: a bundle, a checkpoint, a GGUF file, or a folder of another runtime."""

from exporters.compare.comparison import ComparePlan, Comparison, Side, compare
from exporters.compare.contender import Contender, Described
from exporters.compare.opened import ContenderOptions, open_contender
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
