"""The grammar of an answer that may call tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgekv.text.constraint import SEPARATORS
from edgekv.text.grammar import Grammar
from edgekv.text.thoughts import ThoughtFormat
from edgekv.text.tools.format import CallFormat
from edgekv.text.tools.gemma import arguments_rules
from edgekv.text.tools.tool import Tool, Tools

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TEXT = r"/(.|\n)*/"
_TEXT_WITHOUT_CALL = r"/([^{](.|\n)*)?/"


def special_tokens(tokenizer: Tokenizer, markers: Sequence[str], is_special: Callable[[int], bool]) -> dict[str, int]:
    """Ids of the special tokens that markers consist of; other markers are written as text.

    Args:
        tokenizer: of the bundle.
        markers: such as those of a `CallFormat`.
        is_special: whether grammars take an added token as a special one; llguidance has a rule of its own.
    """
    added = tokenizer.get_added_tokens_decoder()
    return {
        token.content: number
        for number, token in added.items()
        if is_special(number) and any(token.content in text for text in markers)
    }


def tools_grammar(
    tools: Tools, call: CallFormat, special: Mapping[str, int], thoughts: ThoughtFormat | None = None
) -> Grammar | None:
    """What an answer with these tools may be; None if no tool may be called.

    `auto` allows any text, in which a call is bound to the schemas as soon as its marker is written, and thoughts
    before it.

    Args:
        tools: with at least one tool.
        call: how the model writes a call.
        special: as `special_tokens` gives them.
        thoughts: how the model writes thoughts; None if it has none.

    Raises:
        UsageError: a schema that cannot be written in the format, or a grammar that is too large.
    """
    callable_tools = tools.callable
    if not callable_tools:
        return None
    rules = [f"one: {' | '.join(f'tool_{number}' for number in range(len(callable_tools)))}"]
    for number, tool in enumerate(callable_tools):
        field = f"tools[{tools.tools.index(tool)}].function.parameters"
        rules += _tool_rules(number, tool, field, call, special)
    several = tools.parallel and tools.choice in ("auto", "required")
    repeated = "" if not several or call.separator is None else f" ({_literal(call.separator, special)} one)*"
    rules.append(f"body: one{repeated} {_literal(call.close, special)}")
    start, *others = _start_rules(tools, call, special, several=several and call.join is not None)
    if thoughts is not None and thoughts.close in special and tools.choice == "auto" and not call.reply:
        # Free text contains no special tokens. A prompt may end within thoughts.
        marks = (_literal(mark, special) for mark in (thoughts.open, thoughts.close))
        others.append("thoughts: ({})? TEXT {}".format(*marks))
        start = f"start: thoughts? answer\nanswer: {start.removeprefix('start: ')}"
    rules += [start, *others]
    return Grammar("tools", "\n".join(rules))


def _start_rules(tools: Tools, call: CallFormat, special: Mapping[str, int], *, several: bool) -> list[str]:
    opened = f"{_literal(call.open, special)} body"
    if tools.choice != "auto":
        join = _literal(call.join or "", special)
        return [f"start: {opened}" + (f" ({join} {opened})*" if several else "")]
    if call.reply:
        string = json.dumps({"type": "string", "x-guidance": SEPARATORS})
        return [f"start: {opened} | reply", f"reply: {json.dumps(call.reply)} %json {string} {json.dumps('}')}"]
    if not call.open:
        tag = f" | {_literal(call.tag, special)} body" if call.tag in special else ""
        return [f"start: TEXT | body{tag}", f"TEXT: {_TEXT_WITHOUT_CALL}"]
    times = "*" if several else "?"
    marker = next((text for text in special if call.open.startswith(text)), None)
    if marker is not None:
        return [f"start: TEXT ({opened} TEXT){times}" if several else f"start: TEXT ({opened})?", f"TEXT: {_TEXT}"]
    trigger = call.open.split("\n")[0]
    rest = _literal(call.open[len(trigger) :], special)
    tail = f"start: call{times} TEXT" if several else "start: call | TEXT"
    return [tail, f"call: head {rest} body", f"head[lazy]: TEXT {_literal(trigger, special)}", f"TEXT: {_TEXT}"]


def _tool_rules(number: int, tool: Tool, field: str, call: CallFormat, special: Mapping[str, int]) -> list[str]:
    name = f"tool_{number}"
    if call.body == "gemma":
        start, rules = arguments_rules(tool, field, f"{name}_", _literal(call.quote, special))
        return [f"{name}: {_literal(tool.name, special)} {start}", *rules]
    if call.body == "named":
        schema = {**tool.parameters, "x-guidance": SEPARATORS}
        return [f"{name}: {_literal(tool.name + call.middle, special)} %json {json.dumps(schema)}"]
    schema = {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            call.key: _moved(tool.parameters, f"#/properties/{call.key}"),
        },
        "required": ["name", call.key],
        "additionalProperties": False,
        "x-guidance": SEPARATORS,
    }
    return [f"{name}: %json {json.dumps(schema)}"]


def _moved(value: Any, place: str) -> Any:
    """A schema whose references to itself are right in another place of a schema."""
    if isinstance(value, Mapping):
        return {name: _moved_reference(name, member, place) for name, member in value.items()}
    return [_moved(member, place) for member in value] if isinstance(value, list) else value


def _moved_reference(name: str, value: Any, place: str) -> Any:
    is_own = name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
    return place + value[1:] if is_own else _moved(value, place)


def _literal(text: str, special: Mapping[str, int]) -> str:
    """A text in Lark; special tokens are written by their ids."""
    return " ".join(
        f"<[{special[piece]}]>" if piece in special else json.dumps(piece) for piece in _pieces(text, [*special])
    )


def _pieces(text: str, markers: Sequence[str]) -> list[str]:
    """A text cut before and after each marker."""
    places = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not places:
        return [text] if text else []
    at, marker = min(places)
    rest = _pieces(text[at + len(marker) :], markers)
    return [*([text[:at]] if at else []), marker, *rest]
