"""Text in, text out: prompts, sampling, constraints, tools, and tokens as text that can be printed at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.text.constraint import Constraint as Constraint, GrammarCompiler as GrammarCompiler
    from edgekv.text.grammar import Grammar as Grammar
    from edgekv.text.output import (
        Detokenizer as Detokenizer,
        Output as Output,
        StopReason as StopReason,
        Token as Token,
    )
    from edgekv.text.params import (
        BeamParams as BeamParams,
        EarlyStopping as EarlyStopping,
        SamplingParams as SamplingParams,
    )
    from edgekv.text.sampler import LogitsProcessor as LogitsProcessor, Sampler as Sampler
    from edgekv.text.stops import StopSequences as StopSequences
    from edgekv.text.texts import (
        Prompt as Prompt,
        PromptInput as PromptInput,
        Texts as Texts,
        split_turns as split_turns,
    )
    from edgekv.text.tools import Tool as Tool, ToolCall as ToolCall, Tools as Tools

__getattr__, __all__ = lazy(__name__, __file__)
