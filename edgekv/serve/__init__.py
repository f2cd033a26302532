"""`edgekv serve`: OpenAI's API on a bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.lazy import lazy

if TYPE_CHECKING:
    from edgekv.serve.options import Limits, ServeOptions
    from edgekv.serve.serving import Serving

__all__ = ["Limits", "ServeOptions", "Serving"]

__getattr__ = lazy(__name__, {"options": "Limits ServeOptions", "serving": "Serving"})
