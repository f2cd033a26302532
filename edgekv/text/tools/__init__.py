"""Tool calls: declared functions bind the answer, and its calls are read from it."""

from edgekv.text.tools.declare import render_with_tools as render_with_tools
from edgekv.text.tools.format import CallFormat as CallFormat, find_format as find_format
from edgekv.text.tools.grammar import special_tokens as special_tokens, tools_grammar as tools_grammar
from edgekv.text.tools.reader import ToolCallReader as ToolCallReader
from edgekv.text.tools.tool import Tool as Tool, ToolCall as ToolCall, ToolChoice as ToolChoice, Tools as Tools
