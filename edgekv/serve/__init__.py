"""`edgekv serve`: OpenAI's API on a bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.serve.options import Limits as Limits, ServeOptions as ServeOptions
    from edgekv.serve.serving import ModelServer as ModelServer

__getattr__, __all__ = lazy(__name__, __file__)
