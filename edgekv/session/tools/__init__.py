"""Tool calls: declared functions bind the answer, and its calls are read from it."""

from edgekv.session.tools.declare import render_with_tools
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
    "find_format",
    "render_with_tools",
    "special_tokens",
    "tools_grammar",
]
