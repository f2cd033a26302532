"""From a prompt to a stream of tokens and text."""

from edgekv.generate.events import GenerationStats, StopReason, Token
from edgekv.generate.loop import Generation
from edgekv.generate.sampler import Sampler, Sampling
from edgekv.generate.text import Detokenizer, StopSequences

__all__ = [
    "Detokenizer",
    "Generation",
    "GenerationStats",
    "Sampler",
    "Sampling",
    "StopReason",
    "StopSequences",
    "Token",
]
