"""Tool calls: declared functions bind the answer, and its calls are read from it."""

from edgekv.session.tools.declare import declare
from edgekv.session.tools.format import CallFormat, find_format
from edgekv.session.tools.grammar import special_tokens, tools_grammar
from edgekv.session.tools.reader import ToolCallReader
from edgekv.session.tools.tool import Tool, ToolCall, ToolChoice, Tools

__all__ = [
    "CallFormat",
    "Tool",
    "ToolCall",
    "ToolCallReader",
    "ToolChoice",
    "Tools",
    "declare",
    "find_format",
    "special_tokens",
    "tools_grammar",
]
