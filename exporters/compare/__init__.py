"""Two models on one text, side by side: a bundle, a checkpoint, a GGUF file, or a folder of another runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from exporters.compare.comparison import Comparison as Comparison, Side as Side, compare as compare
    from exporters.compare.contender import Contender as Contender, ContenderDescription as ContenderDescription
    from exporters.compare.opened import ContenderOptions as ContenderOptions, open_contender as open_contender
    from exporters.compare.plan import ComparePlan as ComparePlan
    from exporters.compare.show import comparison_lines as comparison_lines

__getattr__, __all__ = lazy(__name__, __file__)
