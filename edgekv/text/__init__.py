"""Text in, text out: prompts, sampling, constraints, tools, and tokens as text that can be printed at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.lazy import lazy

if TYPE_CHECKING:
    from edgekv.text.constraint import Constraint, GrammarCompiler
    from edgekv.text.grammar import Grammar
    from edgekv.text.output import Detokenizer, Output, StopReason, Token
    from edgekv.text.params import BeamParams, EarlyStopping, SamplingParams
    from edgekv.text.sampler import LogitsProcessor, Sampler
    from edgekv.text.stops import StopSequences
    from edgekv.text.texts import FittedPrompt, Prompt, Texts, split_turns
    from edgekv.text.tools import Tool, ToolCall, Tools

__all__ = [
    "BeamParams",
    "Constraint",
    "Detokenizer",
    "EarlyStopping",
    "FittedPrompt",
    "Grammar",
    "GrammarCompiler",
    "LogitsProcessor",
    "Output",
    "Prompt",
    "Sampler",
    "SamplingParams",
    "StopReason",
    "StopSequences",
    "Texts",
    "Token",
    "Tool",
    "ToolCall",
    "Tools",
    "split_turns",
]

__getattr__ = lazy(
    __name__,
    {
        "constraint": "Constraint GrammarCompiler",
        "grammar": "Grammar",
        "output": "Detokenizer Output StopReason Token",
        "params": "BeamParams EarlyStopping SamplingParams",
        "sampler": "LogitsProcessor Sampler",
        "stops": "StopSequences",
        "texts": "FittedPrompt Prompt Texts split_turns",
        "tools": "Tool ToolCall Tools",
    },
)
