"""OpenAI's API on a bundle, asked by OpenAI's own client: each answer is the one that the model gives in Python."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

import edgekv
from benchmarks.serving import ServerProcess, complete, metrics
from edgekv.engine import Engine
from edgekv.serve import ServeOptions
from edgekv.serve.command import summary
from tests.support.serving import NAME, Server, served, talking_bundle

USER: list[Any] = [{"role": "user", "content": "Hello"}]
PROMPT = "<user>Hello</s><assistant>"


@pytest.fixture(scope="module")
def server(talking: Path) -> Iterator[Server]:
    with served(talking) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def alone(talking: Path) -> Iterator[edgekv.Model]:
    """The same bundle without a server."""
    with edgekv.load(talking, threads=1) as model:
        yield model


def _text(model: edgekv.Model, prompt: str, **params: Any) -> str:
    return "".join(token.text for token in model.generate(model.encode_chat(prompt), **params))


def test_the_model_is_listed(server: Server, client: OpenAI):
    (found,) = client.models.list().data
    assert found.model_extra is not None and found.model_extra["input_modalities"] == ["text"]
    assert (found.id, found.object) == (NAME, "model") and client.models.retrieve(NAME) == found
    with pytest.raises(openai.NotFoundError, match="expected 'talker'"):
        client.models.retrieve("gpt")
    assert '"status":"ok"' in server.get("/health")


def test_an_answer_is_the_models_own(client: OpenAI, alone: edgekv.Model):
    answer = client.chat.completions.create(model=NAME, messages=USER, max_completion_tokens=9)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert choice.message.content == _text(alone, PROMPT, max_new_tokens=9)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(alone.encode_chat(PROMPT)), 9)


def test_a_stream_is_the_whole_answer_in_pieces(client: OpenAI):
    wanted: Any = {"model": NAME, "messages": USER, "max_tokens": 12}
    whole = client.chat.completions.create(**wanted)
    with client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 5
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-2:] == [None, "length"]
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None and usage.total_tokens == whole.usage.total_tokens
    assert not any(chunk.usage for chunk in chunks[:-1])


def test_a_request_may_want_several_answers(client: OpenAI, alone: edgekv.Model):
    """Each with a seed of its own, from the given one up; the usage counts all answers, and the prompt once."""
    wanted: Any = {"model": NAME, "messages": USER, "max_tokens": 12, "n": 3, "temperature": 1.0, "seed": 7}
    texts = [_text(alone, PROMPT, max_new_tokens=12, temperature=1.0, seed=7 + index) for index in range(3)]
    answer = client.chat.completions.create(**wanted, logprobs=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert [choice.message.content for choice in answer.choices] == texts
    assert all(choice.logprobs and choice.logprobs.content for choice in answer.choices)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(alone.encode_chat(PROMPT)), 36)
    with client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    streamed, reasons, roles = ["", "", ""], ["", "", ""], list[int]()
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        streamed[choice.index] += choice.delta.content or ""
        reasons[choice.index] += choice.finish_reason or ""
        roles += [choice.index] if choice.delta.role else []
    assert (streamed, reasons, roles) == (texts, ["length"] * 3, [0, 1, 2])
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == answer.usage.total_tokens


def test_prompts_and_answers_of_a_completion_are_numbered(client: OpenAI, alone: edgekv.Model):
    wanted: Any = {"model": NAME, "prompt": ["Once", "Twice"], "max_tokens": 7, "n": 2, "temperature": 1.0, "seed": 3}
    texts = [
        "".join(token.text for token in alone.generate(alone.encode(prompt), 7, temperature=1.0, seed=seed))
        for prompt in ("Once", "Twice")
        for seed in (3, 4)
    ]
    answer = client.completions.create(**wanted)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4 + 5, 28)
    streamed = [""] * 4
    with client.completions.create(**wanted, stream=True) as stream:
        for choice in (choice for chunk in stream for choice in chunk.choices):
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_sampling_follows_the_request(client: OpenAI, alone: edgekv.Model):
    params: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "seed": 7}
    answer = client.chat.completions.create(model=NAME, messages=USER, max_tokens=20, **params)
    assert answer.choices[0].message.content == _text(alone, PROMPT, max_new_tokens=20, **params)
    bias = {alone.encode("e")[-1]: 100.0}
    forced = client.chat.completions.create(
        model=NAME, messages=USER, max_tokens=4, logit_bias={str(token): int(at) for token, at in bias.items()}
    )
    assert forced.choices[0].message.content == "eeee"
    # Clients send these with temperature 0 too, where they change nothing.
    greedy = client.chat.completions.create(model=NAME, messages=USER, max_tokens=5, temperature=0, seed=1, top_p=0.5)
    assert greedy.choices[0].message.content == _text(alone, PROMPT, max_new_tokens=5)


def test_an_event_that_cannot_be_written_ends_its_request(server: Server, monkeypatch: pytest.MonkeyPatch):
    """And its connection, as the status has been sent; not at the end of its 400 tokens."""
    left, metrics = [0] * 40, server.serving.service.metrics
    monkeypatch.setattr("edgekv.serve.completions.CompletionLogprobs.add", lambda *_: left.pop())
    body = json.dumps({"prompt": "Once", "max_tokens": 400, "logprobs": 1, "stream": True, "ignore_eos": True})
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    before = metrics.generated_tokens
    answer = server.raw(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    assert answer.startswith(b"HTTP/1.1 200 ") and b"[DONE]" not in answer
    while '"running":0' not in server.get("/health"):  # it ends with the current step
        time.sleep(0.01)
    assert 40 <= metrics.generated_tokens - before < 400


def test_an_answer_ends_before_a_stop_text(client: OpenAI, alone: edgekv.Model):
    text = _text(alone, PROMPT, max_new_tokens=30)
    stop = next(character for character in reversed(text) if character.isascii())
    answer = client.chat.completions.create(model=NAME, messages=USER, max_tokens=30, stop=[stop, "never"])
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_without_a_limit_ends_with_the_context(client: OpenAI, server: Server):
    answer = client.chat.completions.create(model=NAME, messages=USER, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length" and answer.usage is not None
    assert answer.usage.total_tokens == server.serving.service.context + 1  # the last token is not run


def test_log_probabilities_are_those_of_the_logits(client: OpenAI, alone: edgekv.Model):
    answer = client.chat.completions.create(
        model=NAME, messages=USER, max_tokens=6, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True}
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    generation = alone.generate(alone.encode_chat(PROMPT), max_new_tokens=6, ignore_eos=True, return_logits=True)
    # Rows of the server's prefix cache come from other graphs, so that logits may differ by a few steps of their
    # integers; by how many depends on the processor.
    few_steps = 8 * alone.bundle.manifest.encodings["logits"].scale
    assert few_steps < 0.01
    for token, found in zip(generation, logprobs.content, strict=True):
        assert token.logits is not None
        values = sorted(token.logits, reverse=True)
        normalizer = math.log(sum(math.exp(value - values[0]) for value in values)) + values[0]
        assert found.logprob == pytest.approx(token.logits[token.id] - normalizer, abs=few_steps)
        assert [each.logprob for each in found.top_logprobs] == pytest.approx(
            [value - normalizer for value in values[:3]], abs=few_steps
        )
    said = b"".join(bytes(found.bytes or []) for found in logprobs.content)
    content = answer.choices[0].message.content
    unfinished = "\ufffd"  # a cut text ends before a character's first bytes
    assert content and said.decode(errors="replace").rstrip(unfinished) == content.rstrip(unfinished)


def test_a_text_is_continued(client: OpenAI, alone: edgekv.Model):
    tokens = alone.encode("Once")
    expected = "".join(token.text for token in alone.generate(tokens, max_new_tokens=7))
    for prompt in ("Once", tokens, ["Once"], [tokens]):
        answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=7)
        assert answer.choices[0].text == expected
    both = client.completions.create(model=NAME, prompt=["Once", "Twice"], max_tokens=7)
    assert [choice.index for choice in both.choices] == [0, 1] and both.choices[0].text == expected
    with client.completions.create(model=NAME, prompt="Once", max_tokens=7, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == expected
    echoed = client.completions.create(model=NAME, prompt="Once", max_tokens=7, echo=True)
    assert echoed.choices[0].text == "Once" + expected


@pytest.mark.parametrize("tokens", [0, 1])
def test_the_prompt_is_scored(client: OpenAI, alone: edgekv.Model, tokens: int):
    """As lm-eval asks for the likelihood of a text."""
    prompt = alone.encode("Once upon a time, there was a prompt of more than a step.")
    answer = client.completions.create(model=NAME, prompt=[prompt], max_tokens=tokens, logprobs=1, echo=True)
    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs is not None and found.text_offset is not None
    assert len(found.token_logprobs) == len(prompt) + tokens and found.token_logprobs[0] is None
    rows = alone.score(prompt)
    for at in range(1, len(prompt)):
        row = rows[at - 1]
        normalizer = math.log(sum(math.exp(value - max(row)) for value in row)) + max(row)
        assert found.token_logprobs[at] == pytest.approx(row[prompt[at]] - normalizer, abs=1e-4)
    assert found.tokens is not None and "".join(found.tokens) == answer.choices[0].text
    assert found.text_offset[:3] == [0, 1, 2]


def test_offsets_index_the_text(bundle: Path):
    """BOS, which the tokenizer adds, has no text, and é has two tokens."""
    special = "<|begin_of_text|>"
    with served(bundle) as server:
        ids = server.model.encode("aé b")
        for prompt in ("Once é upon", "<|end_of_text|>a b", "", ids, ids[2:]):
            answer = server.client().completions.create(
                model=NAME, prompt=prompt, max_tokens=4, logprobs=0, echo=True, logit_bias={"160": 20}
            )
            (choice,) = answer.choices
            found = choice.logprobs
            assert found is not None and found.text_offset is not None and found.tokens is not None
            assert found.text_offset == sorted(found.text_offset)
            for token, start in zip(found.tokens, found.text_offset, strict=True):
                if "\ufffd" not in token and (token != special or not isinstance(prompt, str)):
                    assert choice.text[start:].startswith(token), (prompt, found)


def _answers(server: Server, texts: Sequence[str], most: int) -> list[str]:
    """What the server answers to texts that are all sent at once."""

    async def ask(client: AsyncOpenAI, text: str) -> str:
        stream = await client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": text}], max_tokens=most, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.serving.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, text) for text in texts))

    return asyncio.run(ask_all())


def test_a_streamed_chat_completion_is_answered_in_41_files_19_of_them_beside_the_engine(talking: Path):
    """A reader who follows a turn from its request to the end of its stream opens no more, whatever thread it is in."""
    package, files, all_files, is_asked = Path(edgekv.__file__).parent, set[str](), set[str](), False
    engine = str(package / "engine")

    def called(frame: FrameType | None, event: str, _: object) -> None:
        if event != "call" or frame is None or not is_asked:
            return
        if (file := frame.f_code.co_filename).startswith(str(package)):
            all_files.add(file)
            while frame := frame.f_back:
                if frame.f_code.co_filename.startswith(engine):  # what the engine does
                    return
            files.add(file.removeprefix(str(package)))

    threading.setprofile(called)  # in threads that start from now on
    try:
        with served(talking) as server:
            first: list[Any] = [*USER, {"role": "assistant", "content": "Hi"}]
            for turn in ("More", "And more"):
                body = {"messages": [*first, {"role": "user", "content": turn}], "max_tokens": 4, "stream": True}
                assert len(server.events("/v1/chat/completions", body)) > 2
                is_asked ^= True
    finally:
        threading.setprofile(None)
    assert "/text/texts.py" in files and len(files) <= 19, sorted(files)
    assert len(all_files) <= 41, sorted(all_files)


CHAIN = {"Exchange", "ChatRequest", "Prompt", "Request", "PendingAnswer", "Sequence"}
"""The types of a request, from its socket to its tokens."""
ANSWERING = {"_AnswerWriter", "_Reply", "_Row", "Runner", "Session", "Output", "Detokenizer"}
"""Those that write its answer, hold its cache and run it, and make text of tokens."""


def _fields(thing: object) -> dict[str, Any]:
    """The attributes of an object, whatever kind of class it has."""
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    names = {*slots, *getattr(thing, "__dict__", {}), *getattr(thing, "__struct_fields__", ())}
    return {name: getattr(thing, name) for name in names if hasattr(thing, name)}


def test_a_request_is_six_types_from_its_socket_to_its_tokens(talking: Path, monkeypatch: pytest.MonkeyPatch):
    """No other type has its messages or the tokens of its prompt, or one of the six, but those that answer it."""
    held, real = set[str](), Engine.step

    def is_of_request(value: Any, tokens: list[int]) -> bool:
        if isinstance(value, list | tuple) and value:
            return [*value[: len(tokens)]] == tokens or value[0] == {"role": "user", "content": "zebra"}
        return str(type(value).__module__).startswith("edgekv") and type(value).__name__ in CHAIN

    def step(engine: Engine, only: Any = None) -> Any:
        events = real(engine, only)
        for sequence in [] if held or not events else engine.running:
            end = time.monotonic() + 5  # until the thread that made its tokens has let it go
            while not held or (not held <= CHAIN | ANSWERING and time.monotonic() < end):
                held.clear()
                held.update(types_of([*sequence.request.tokens]))
        return events

    def types_of(tokens: list[int]) -> set[str]:
        return {
            type(thing).__name__
            for thing in gc.get_objects()
            if type(thing).__module__.startswith("edgekv")
            and id(thing) not in others
            and any(is_of_request(value, tokens) for value in _fields(thing).values())
        }

    monkeypatch.setattr(Engine, "step", step)
    with served(talking) as server:
        # What other tests have left; kept, so that nothing new has the same id.
        others = {id(thing): thing for thing in gc.get_objects() if str(type(thing).__module__).startswith("edgekv")}
        body = {"messages": [{"role": "user", "content": "zebra"}], "max_tokens": 4, "stream": True}
        server.events("/v1/chat/completions", body)
    assert {"ChatRequest", "Request", "PendingAnswer", "Sequence"} <= held <= CHAIN | ANSWERING, held - CHAIN


@pytest.mark.slow
def test_clients_that_ask_at_once_get_their_own_answers(server: Server, alone: edgekv.Model):
    texts = [f"Say {'very ' * (at % 5)}{at}" for at in range(12)]
    wanted = [_text(alone, f"<user>{text}</s><assistant>", max_new_tokens=25) for text in texts]
    assert _answers(server, texts, 25) == wanted


@pytest.mark.htp
def test_the_htp_serves_several_clients_too(talking: Path):
    texts = ["Say one", "Say two", "Say one and two"]
    with edgekv.load(talking, "htp") as model:
        wanted = [_text(model, f"<user>{text}</s><assistant>", max_new_tokens=5) for text in texts]
    with served(talking, engine="htp") as server:
        assert _answers(server, texts, 5) == wanted


def test_help_needs_neither_the_extra_nor_the_runtime():
    code = (
        "import sys; sys.modules['starlette'] = sys.modules['uvicorn'] = None\n"
        "from edgekv.serve.command import serve\n"
        "print('edgekv.runtime.engine' in sys.modules, 'onnxruntime' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    age: int = Field(ge=0, le=99)


def test_an_answer_fits_its_schema(client: OpenAI, server: Server):
    """Structured outputs with a pydantic model, and with random weights."""
    parsed = client.chat.completions.parse(model=NAME, messages=USER, response_format=Person, max_tokens=80)
    person = parsed.choices[0].message.parsed
    assert isinstance(person, Person) and parsed.choices[0].finish_reason == "stop"
    free = client.chat.completions.create(
        model=NAME, messages=USER, max_tokens=60, response_format={"type": "json_object"}, temperature=1.0, seed=1
    )
    assert (free.choices[0].message.content or "").startswith("{")
    assert "edgekv_grammars_compiling 0\n" in server.get("/metrics")
    endless = {"$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}}
    schema: Any = {"name": "x", "schema": {**endless, "$ref": "#/$defs/a"}}
    with pytest.raises(openai.BadRequestError, match="recursion without end"):
        client.chat.completions.create(
            model=NAME, messages=USER, response_format={"type": "json_schema", "json_schema": schema}
        )
    with pytest.raises(openai.BadRequestError, match=r"response_format.type: got 'xml'"):
        client.chat.completions.create(model=NAME, messages=USER, response_format={"type": "xml"})  # type: ignore


CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {**CITY, "additionalProperties": False}}}
]


def test_tools_are_called_as_declared(client: OpenAI):
    wanted: Any = {"model": NAME, "messages": USER, "tools": TOOLS, "tool_choice": "required", "max_tokens": 120}
    answer = client.chat.completions.create(**wanted, parallel_tool_calls=False)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None and choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    with client.chat.completions.stream(**wanted, parallel_tool_calls=False) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls" and streamed.message.tool_calls
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    result: Any = [choice.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    again = client.chat.completions.create(**{**wanted, "messages": [*USER, *result], "tool_choice": "none"})
    assert again.choices[0].message.content and not again.choices[0].message.tool_calls
    with pytest.raises(openai.BadRequestError, match=r"tool_choice: got 'fly'"):
        client.chat.completions.create(**{**wanted, "tool_choice": "fly"})


WITHOUT_TOOLS = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model whose chat template knows no tools, and wants the roles in turn."""
    with served(talking_bundle(tmp_path_factory.mktemp("plain"), WITHOUT_TOOLS)) as server:
        yield server


def test_a_template_without_tools_has_them_in_its_messages(plain: Server):
    """With random weights too, each call fits its schema; results and answers come back as text."""
    client = plain.client()
    wanted: Any = {"model": NAME, "messages": USER, "tools": TOOLS, "max_tokens": 120}
    answer = client.chat.completions.create(**wanted, tool_choice="required", parallel_tool_calls=False)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None and choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    with client.chat.completions.stream(**wanted, tool_choice="required", parallel_tool_calls=False) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    result: Any = [choice.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    for options in ({"tool_choice": "none"}, {"tool_choice": "auto"}, {}):
        again = client.chat.completions.create(**{**wanted, "messages": [*USER, *result], **options})
        message = again.choices[0].message
        assert message.tool_calls or not (message.content or "").startswith("{"), message
    item: Any = {"type": "function", **TOOLS[0]["function"]}
    response = client.responses.create(
        model=NAME, input="Hello", tools=[item], tool_choice="required", max_output_tokens=120
    )
    assert response.output[0].type == "function_call"


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_to_tools_in_messages_is_plain_text_or_a_call(plain: Server, seed: int):
    """The notation shows neither in a whole answer nor in a stream."""
    wanted: Any = {"model": NAME, "messages": USER, "tools": TOOLS, "max_tokens": 60, "temperature": 1.0, "seed": seed}
    message = plain.client().chat.completions.create(**wanted).choices[0].message
    with plain.client().chat.completions.create(**wanted, stream=True) as stream:
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    assert len([call for delta in deltas for call in delta.tool_calls or []]) == len(message.tool_calls or [])
    assert not (message.content or "").startswith('{"')


def test_a_template_that_refuses_the_messages_is_quoted(plain: Server):
    with pytest.raises(
        openai.BadRequestError, match="messages: got TemplateRuntimeError: Roles must alternate"
    ) as refused:
        plain.client().chat.completions.create(model=NAME, messages=[*USER, *USER])
    assert refused.value.param == "messages"
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"a": deep}
    call = {"id": "1", "function": {"name": "f", "arguments": deep}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}, *USER]
    status, answer = plain.post("/v1/chat/completions", {"model": NAME, "messages": messages, "max_tokens": 1})
    assert status in (200, 400) and "bug" not in str(answer)
    odd: list[Any] = [{"id": ["x"], "function": {"name": {}, "arguments": "{"}}, 3]
    result = {"role": "tool", "tool_call_id": {"a": 1}, "content": "x"}
    body = {"messages": [*USER, {"role": "assistant", "tool_calls": odd}, result], "tools": TOOLS, "max_tokens": 1}
    status, answer = plain.post("/v1/chat/completions", body)
    assert status == 200, answer


def test_responses_are_answers_too(client: OpenAI, alone: edgekv.Model):
    answer = client.responses.create(model=NAME, input="Hello", max_output_tokens=9)
    assert answer.output_text == _text(alone, PROMPT, max_new_tokens=9) and answer.status == "incomplete"
    assert answer.usage is not None and answer.usage.output_tokens == 9
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    with client.responses.stream(model=NAME, input="Hello", max_output_tokens=9) as stream:
        events = list(stream)
    kinds = [each.type for each in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.incomplete"
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == answer.output_text
    assert [each.sequence_number for each in events] == list(range(len(events)))


def test_a_response_continues_another(client: OpenAI, alone: edgekv.Model):
    first = client.responses.create(model=NAME, input="Hello", max_output_tokens=5, instructions="Be brief.")
    second = client.responses.create(
        model=NAME, input="More", max_output_tokens=5, previous_response_id=first.id, store=False
    )
    prompt = f"<user>Hello</s><assistant>{first.output_text}</s><user>More</s><assistant>"
    assert second.output_text == _text(alone, prompt, max_new_tokens=5)
    client.responses.delete(first.id)
    for gone in (first.id, second.id):
        with pytest.raises(openai.NotFoundError, match="expected one that is stored"):
            client.responses.create(model=NAME, input="More", previous_response_id=gone)


def test_responses_call_tools_and_fit_schemas(client: OpenAI):
    tools: list[Any] = [{"type": "function", **TOOLS[0]["function"], "strict": True}]
    wanted: Any = {"model": NAME, "tools": tools, "max_output_tokens": 120, "parallel_tool_calls": False}
    answer = client.responses.create(**wanted, input="Hello", tool_choice="required")
    (call,) = answer.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    outcome: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    turn: Any = [{"role": "user", "content": "Hello"}, call.to_dict(), outcome]
    assert client.responses.create(**wanted, input=turn, tool_choice="none").output_text
    with client.responses.stream(**wanted, input="Hello", tool_choice="required") as stream:
        assert stream.get_final_response().output[0].type == "function_call"
    parsed = client.responses.parse(model=NAME, input="Hello", text_format=Person, max_output_tokens=80)
    assert isinstance(parsed.output_parsed, Person)


@pytest.mark.slow
def test_the_command_names_the_model_and_how_it_is_computed(talking: Path):
    command = [sys.executable, "-m", "edgekv", "serve", str(talking), "--port", "0", "--name", "m", "--threads", "1"]
    pipe = subprocess.PIPE
    for options, says_more in (([], True), (["-q"], False)):
        with subprocess.Popen([*command, *options], stdout=pipe, stderr=pipe, text=True) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert OpenAI(base_url=first.split()[0], api_key="none").models.list().data
            process.terminate()
            out, told = process.communicate(timeout=30)
        assert first.endswith("/v1 serves m on cpu-fast\n") and out == ""
        if not says_more:
            assert told == ""
            continue
        assert told.startswith(f"chat page  {first.split('v1')[0]}\ncontext    512 tokens")
        assert re.search(r"^ready after [\d.]+ s$", told, re.M)
        assert "sessions   16, caches within 50% of the free memory; 64 more requests may wait\n" in told
        assert "API keys   none: every request is accepted\n" in told and "GET /v1/models 200, total " in told


def test_texts_become_tokens_and_tokens_texts(talking: Path):
    with served(talking) as server:
        plain = server.model.encode_chat("Hello</s>")
        for body, tokens in (
            ({"content": "Hello</s>"}, plain),
            ({"prompt": "Hello</s>"}, server.model.encode("Hello</s>")),
            ({"prompt": "Hello</s>", "add_special_tokens": False}, plain),
        ):
            status, answer = server.post("/tokenize", body)
            assert status == 200 and answer["tokens"] == tokens and answer["count"] == len(tokens)
        status, answer = server.post("/detokenize", {"tokens": plain})
        assert status == 200 and answer["content"] == answer["prompt"] == "Hello</s>"
        for path, body, said in (
            ("/tokenize", {}, "content, prompt: got neither"),
            ("/tokenize", {"content": "a", "prompt": "b"}, "content, prompt: got both"),
            ("/detokenize", {"tokens": [10**9]}, "tokens: got 1000000000; expected 0 to 319"),
            ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ):
            status, answer = server.post(path, body)
            assert status == 400 and said in answer["error"]["message"]


def test_the_summary_says_that_there_is_no_chat(bundle: Path):
    with served(bundle) as server:
        told = list(summary(server.serving, ServeOptions(), "50%", None))
    assert told[0] == "chat       no: the bundle has no chat template; /v1/completions continues texts"


@pytest.mark.slow
def test_the_command_survives_being_killed(talking: Path, tmp_path: Path):
    """After SIGKILL in the middle of an answer the next server uses what the first one stored; SIGTERM ends it."""
    options = ("--threads", "1", "--cpu-mode", "emulate", "--prefix-cache", str(tmp_path))
    first = ServerProcess(talking, *options)
    whole = asyncio.run(complete(first.port, "A prompt that is stored", 20))
    assert asyncio.run(complete(first.port, "Another one", 400, leave_after=3)).reason is None
    first.kill()
    second = ServerProcess(talking, *options)
    assert asyncio.run(complete(second.port, "A prompt that is stored", 20)).text == whole.text
    found = asyncio.run(metrics(second.port))
    assert found["prompt_tokens_restored_total"] > 0 and found["prefix_cache_rejected_files_total"] == 0
    assert second.stop() == 128 + signal.SIGTERM
