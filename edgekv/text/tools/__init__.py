"""Tool calls: declared functions bind the answer, and its calls are read from it."""

from edgekv.text.tools.declare import render_with_tools
from edgekv.text.tools.format import CallFormat, find_format
from edgekv.text.tools.grammar import special_tokens, tools_grammar
from edgekv.text.tools.reader import ToolCallReader
from edgekv.text.tools.tool import Tool, ToolCall, ToolChoice, Tools

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
