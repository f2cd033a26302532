"""Items of `/v1/responses` as messages: nothing that the model thought, said or called is lost or told twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from edgekv.serve.responses import (
    CallItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    as_messages,
    read_input,
)

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _item(word: str) -> Item:
    kind, _, text = word.partition(":")
    if kind == "call":
        return CallItem("fc", "c", "f", "{}", "completed")
    if kind == "think":
        return ReasoningItem("rs", "completed", [ReasoningText(text)])
    return MessageItem("msg", "completed", [OutputText(text)])


def _input(word: str) -> dict[str, Any]:
    kind, _, text = word.partition(":")
    if kind == "call":
        return {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    if kind == "think":
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def _message(content: str | None, thoughts: str = "", calls: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        found["reasoning_content"] = thoughts
    return found | ({"tool_calls": [CALL] * calls} if calls else {})


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        (["think:r", "say:a"], [_message("a", "r")]),
        (["think:r", "call", "say:a"], [_message("a", "r", 1)]),
        (["say:a", "think:r", "call"], [_message("a", "r", 1)]),
        (["think:r", "say:a", "think:s", "call", "call"], [_message("a", "r\n\ns", 2)]),
        (["think:r", "call", "think:s", "call"], [_message(None, "r\n\ns", 2)]),
        (["think:r", "think:s", "say:a"], [_message("a", "r\n\ns")]),
        (["say:a", "think:r", "say:b"], [_message("a"), _message("b", "r")]),
        (["think:r"], [_message("", "r")]),
        (["say:a", "think:r"], [_message("a", "r")]),
    ],
)
def test_an_answer_and_its_items_sent_back_are_the_same_messages(
    items: Sequence[str], messages: list[dict[str, Any]]
) -> None:
    assert as_messages([_item(each) for each in items]) == messages
    assert read_input([_input(each) for each in items])[0] == messages


def test_thoughts_belong_to_the_model_alone() -> None:
    user = {"role": "user", "content": "u"}
    messages, fields = read_input([user, _input("think:r"), user, _input("say:a")])
    assert messages == [user, _message("", "r"), user, _message("a")]
    assert fields == ["input[0]", "input[2]", "input[2]", "input[3]"]
    assert read_input([user, _input("think:r")]) == ([user, _message("", "r")], ["input[0]", "input"])
