"""`edgekv serve`: OpenAI's API on a bundle."""

from edgekv.serve.options import Limits, ServeOptions
from edgekv.serve.serving import Serving

__all__ = ["Limits", "ServeOptions", "Serving"]
