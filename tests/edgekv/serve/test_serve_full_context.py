"""Conversations that fill the context of a server: their oldest turns are dropped, and the answer says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

import edgekv
from edgekv.cli import run
from tests.support.serving import NAME, Server, served

HEADER = "x-edgekv-dropped-messages"
CONTEXT = 512


@pytest.fixture(scope="module")
def server(talking: Path) -> Iterator[Server]:
    with served(talking, origins=("http://page.example",)) as server:
        yield server


@pytest.fixture(scope="module")
def stopping(talking: Path) -> Iterator[Server]:
    with served(talking, on_full="stop") as server:
        yield server


def _turns(count: int) -> list[Any]:
    """A system prompt and a conversation, with 53 tokens a turn."""
    messages = [{"role": "system", "content": "Be brief."}]
    for turn in range(count):
        messages += [{"role": "user", "content": f"{turn:02d}" + "x" * 20}, {"role": "assistant", "content": "y" * 9}]
    return messages[:-1]


def _ask(client: OpenAI, messages: list[Any], **options: Any) -> tuple[int, Any]:
    """The dropped messages, and the answer."""
    raw = client.chat.completions.with_raw_response.create(model=NAME, messages=messages, **options)
    return int(raw.headers.get(HEADER, 0)), raw.parse()


def test_the_oldest_turns_are_dropped_and_the_answer_says_how_many(server: Server, talking: Path) -> None:
    messages, client = _turns(20), server.client()
    dropped, answer = _ask(client, messages, max_tokens=6)
    assert dropped > 20 and dropped % 2 == 0 and answer.usage.prompt_tokens <= CONTEXT - 6
    with edgekv.load(talking, threads=1) as alone:
        kept = [messages[0], *messages[1 + dropped :]]
        assert kept[1]["role"] == "user"
        prompt = alone.encode_chat(alone.chat_templates.render(kept))
        assert answer.usage.prompt_tokens == len(prompt)
        text = "".join(token.text for token in alone.generate(prompt, max_new_tokens=6))
        assert answer.choices[0].message.content == text
    assert _ask(client, _turns(2), max_tokens=6)[0] == 0


def test_the_turns_of_a_long_conversation_continue_the_cache(server: Server) -> None:
    client, before, continued = server.client(), 0, []
    for count in range(12, 24):
        dropped, answer = _ask(client, _turns(count), max_tokens=6)
        if dropped == before:
            continued.append(answer.usage.prompt_tokens_details.cached_tokens / answer.usage.prompt_tokens)
        before = dropped
    assert len(continued) >= 5 and min(continued) > 0.5


def test_a_stream_and_a_page_of_another_origin_are_told_too(server: Server) -> None:
    create = server.client().chat.completions.with_raw_response.create
    raw = create(
        model=NAME, messages=_turns(20), max_tokens=3, stream=True, extra_headers={"origin": "http://page.example"}
    )
    assert int(raw.headers[HEADER]) > 20 and HEADER in raw.headers["access-control-expose-headers"].lower()
    assert [*raw.parse()][-1].choices[0].finish_reason == "length"


def test_an_answer_has_room(server: Server) -> None:
    _, answer = _ask(server.client(), _turns(20), extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens > CONTEXT // 4 and answer.choices[0].finish_reason == "length"


def test_a_server_may_refuse_instead(stopping: Server, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"model": NAME, "messages": _turns(20), "max_tokens": 3}
    status, answer = stopping.post("/v1/chat/completions", body)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert _ask(stopping.client(), _turns(2), max_tokens=3)[0] == 0
    assert run(["serve", "no bundle", "--on-full", "slide"]) == 2
    assert "--on-full: got 'slide'" in capsys.readouterr().err


@pytest.mark.parametrize(("truncation", "status"), [("auto", 200), ("disabled", 400), (None, 200), ("middle", 400)])
def test_a_response_may_choose(server: Server, truncation: str | None, status: int) -> None:
    body = {"model": NAME, "input": _turns(20), "max_output_tokens": 3, "truncation": truncation}
    found, answer = server.post("/v1/responses", body)
    assert found == status
    if status == 200:
        assert answer["truncation"] == "auto"
    else:
        code = "context_length_exceeded" if truncation == "disabled" else "invalid_value"
        assert answer["error"]["code"] == code
        assert truncation == "disabled" or "expected auto or disabled" in answer["error"]["message"]


def test_a_response_of_a_refusing_server_may_choose_too(stopping: Server) -> None:
    body = {"model": NAME, "input": _turns(20), "max_output_tokens": 3}
    assert stopping.post("/v1/responses", body)[0] == 400
    assert stopping.post("/v1/responses", {**body, "truncation": "auto"})[1]["truncation"] == "auto"
    short = stopping.post("/v1/responses", {**body, "input": "Hello"})[1]
    assert short["truncation"] == "disabled"
    stored, length = short["id"], 0
    for _ in range(12):  # what is stored is whole, and each answer drops what it must
        next_body = {**body, "input": "x" * 40, "truncation": "auto", "previous_response_id": stored}
        answer = stopping.post("/v1/responses", next_body)[1]
        stored, length = answer["id"], max(length, answer["usage"]["input_tokens"])
    assert CONTEXT // 2 < length <= CONTEXT
    assert stopping.post("/v1/responses", {**next_body, "truncation": "disabled"})[0] == 400
