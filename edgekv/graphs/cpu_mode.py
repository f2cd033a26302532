"""How the CPU engine computes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, TypeAlias, get_args

RenderedMode: TypeAlias = Literal["exact16", "fast"]
CpuMode: TypeAlias = Literal["emulate", "exact16", "fast"]
"""How the CPU engine computes.

- `emulate`: every result is rounded as on the HTP.
- `exact16`: the bundle's integers as weights; activations are float, and have 16 bits where weights multiply them.
- `fast`: as `exact16`, with 8 bits in steps of few tokens, such as decode steps.

Keys and values have the bundle's type in all modes.
"""

CPU_MODES: tuple[CpuMode, ...] = get_args(CpuMode)
BUILDING_EXTRA = "cpu"


def can_build() -> bool:
    """Whether the package of the extra `cpu`, which graphs are built with, is installed. It is not imported.

    Without it `emulate` runs the exported graphs, with the same results, and the other modes run only what is kept.
    """
    try:
        return find_spec("onnx") is not None
    except ImportError:
        return False
