"""Text in, text out: prompts, sampling, constraints, tools, and tokens as text that can be printed at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.text.constraint import Constraint as Constraint
    from edgekv.text.constraint import GrammarCompiler as GrammarCompiler
    from edgekv.text.grammar import Grammar as Grammar
    from edgekv.text.output import Detokenizer as Detokenizer
    from edgekv.text.output import Output as Output
    from edgekv.text.output import StopReason as StopReason
    from edgekv.text.output import Token as Token
    from edgekv.text.params import BeamParams as BeamParams
    from edgekv.text.params import EarlyStopping as EarlyStopping
    from edgekv.text.params import SamplingParams as SamplingParams
    from edgekv.text.sampler import LogitsProcessor as LogitsProcessor
    from edgekv.text.sampler import Sampler as Sampler
    from edgekv.text.stops import StopSequences as StopSequences
    from edgekv.text.texts import FittedPrompt as FittedPrompt
    from edgekv.text.texts import Prompt as Prompt
    from edgekv.text.texts import Texts as Texts
    from edgekv.text.texts import split_turns as split_turns
    from edgekv.text.tools import Tool as Tool
    from edgekv.text.tools import ToolCall as ToolCall
    from edgekv.text.tools import Tools as Tools

__getattr__, __all__ = lazy(__name__, __file__)
