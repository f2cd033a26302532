"""What a request may be: bad input gets an answer that names the field, and no client can hold the server up."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgekv.engine import Engine
from edgekv.errors import UsageError
from edgekv.serve import Limits
from edgekv.spec.chat import ChatTemplates
from tests.serving import NAME, Server, served

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"model": NAME, "prompt": "Hello", "max_tokens": 2}


@pytest.fixture(scope="module")
def server(talking: Path) -> Iterator[Server]:
    limits = Limits(body_bytes=20_000, header_bytes=4096, header_s=0.3, body_s=0.3, send_s=0.5)
    with served(talking, limits) as server:
        yield server


@pytest.fixture(autouse=True)
def still_answers(server: Server) -> Iterator[None]:
    yield
    assert server.post(COMPLETIONS, HELLO)[0] == 200


def _messages(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": list(messages), **fields}


def _function(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": _flat(parameters)}


def _flat(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "name": "g", "parameters": parameters}


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _text_format(schema: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "schema": schema}}


RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "Hello"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"city": "Rome"}'}
OUTCOME = {"type": "function_call_output", "call_id": "1", "output": "rain"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
UNBOUND = {"type": "object", "properties": {"a": {"not": {}}}}
"""A schema with a keyword that nothing enforces: it is refused when it is compiled."""


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        (CHAT, b"", 400, "body", "JSON"),
        (CHAT, b"{", 400, "body", "JSON"),
        (CHAT, b'{"x":' + b"[" * 9999, 400, "body", "recursion"),
        (CHAT, b'"\\ud800"', 400, "body", "JSON"),
        (CHAT, b'{"model": "\xff"}', 400, "body", "utf-8"),
        (CHAT, b"null", 400, None, "body: Expected `object`, got `null`."),
        (CHAT, {"model": NAME}, 400, "messages", "missing"),
        (CHAT, _messages(USER, model=3), 400, "model", "Expected `str | null`"),
        (CHAT, _messages(USER, model="other"), 404, "model", f"expected '{NAME}'"),
        (CHAT, _messages(), 400, "messages", "at least one"),
        (CHAT, _messages({"role": "king", "content": "x"}), 400, "messages[0].role", "'king'"),
        (CHAT, _messages({"role": "user"}), 400, "messages[0].content", "text"),
        (CHAT, _messages({"role": "user", "content": [{"type": "image_url"}]}), 400, "messages[0].content[0]", "text"),
        (CHAT, _messages(USER, temperature="hot"), 400, "temperature", "Expected"),
        (CHAT, _messages(USER, temperature=-1), 400, "temperature", "0, or at least"),
        (CHAT, _messages(USER, top_p=2, temperature=1), 400, "top_p", "at most 1"),
        (CHAT, _messages(USER, n=0), 400, "n", "expected 1 to 32"),
        (CHAT, _messages(USER, n=33), 400, "n", "expected 1 to 32"),
        (CHAT, _messages(USER, n=1 << 63), 400, "n", "expected 1 to 32"),
        (CHAT, _messages(USER, n=2, best_of=3), 400, "best_of", "expected 2, the value of n"),
        (COMPLETIONS, {**HELLO, "prompt": ["x"] * 3, "n": 11}, 400, "n", "expected 1 to 10 with 3 prompts"),
        ("/v1/responses", {"model": NAME, "input": "x", "n": 2}, 400, "n", "expected 1"),
        (CHAT, _messages(USER, max_tokens=0), 400, "max_tokens", "expected 1 to"),
        (CHAT, _messages(USER, max_completion_tokens=-1), 400, "max_completion_tokens", "expected 1 to"),
        (COMPLETIONS, {**HELLO, "max_tokens": 0}, 400, "max_tokens", "expected 1 to"),
        ("/v1/responses", {"model": NAME, "input": "x", "max_output_tokens": 0}, 400, "max_output_tokens", "got 0"),
        (CHAT, _messages(USER, stop=["x"] * 17), 400, "stop", "at most 16"),
        (CHAT, _messages(USER, stop=""), 400, "stop", "one character"),
        (CHAT, _messages(USER, logit_bias={"x": 1}), 400, "logit_bias", "token ids"),
        (CHAT, _messages(USER, logit_bias={"999999": 1}), 400, "logit_bias", "vocabulary"),
        (CHAT, _messages(USER, logit_bias={"1": 1e308}), 400, "logit_bias", "at most 1e30 in magnitude"),
        (CHAT, _messages(USER, repetition_penalty=1e308), 400, "repetition_penalty", "0.000001 to 1,000,000"),
        (CHAT, _messages(USER, top_logprobs=2), 400, "top_logprobs", "logprobs"),
        (CHAT, _messages(USER, logprobs=True, top_logprobs=21), 400, "top_logprobs", "0 to 20"),
        (CHAT, _messages(USER, functions=[]), 400, "functions", "not supported"),
        (CHAT, _messages(USER, audio={}), 400, "audio", "not supported"),
        (CHAT, _messages(USER, chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs", "messages"),
        (CHAT, _messages(USER, tools=[{"type": "code"}]), 400, "tools[0]", "function"),
        (CHAT, _messages(USER, tools=[FUNCTION, _function(UNBOUND)]), 400, "tools[1].function.parameters", "not"),
        (CHAT, _messages(USER, response_format={}), 400, "response_format.type", "missing"),
        (CHAT, _messages(USER, response_format=_schema(UNBOUND)), 400, "response_format.json_schema.schema", "not"),
        (CHAT, _messages(USER, response_format=_schema(False)), 400, "response_format.json_schema.schema", "false"),
        (CHAT, _messages(USER, {"role": "assistant", "tool_calls": [1]}), 400, "messages", "template accepts"),
        (CHAT, _messages(USER, seed=1 << 70, temperature=1), 400, "seed", "64 bits"),
        (COMPLETIONS, {**HELLO, "suffix": "x"}, 400, "suffix", "leave it out"),
        (COMPLETIONS, {**HELLO, "prompt": []}, 400, "prompt", "no prompt"),
        (COMPLETIONS, {**HELLO, "prompt": ["x", 1]}, 400, "prompt", "mixture"),
        (COMPLETIONS, {**HELLO, "prompt": [1 << 40]}, 400, "prompt", "vocabulary"),
        (COMPLETIONS, {**HELLO, "prompt": [[]]}, 400, "prompt[0]", "no tokens"),
        (COMPLETIONS, {**HELLO, "prompt": ["x", "y" * 600]}, 400, "prompt[1]", "got 600 tokens"),
        (COMPLETIONS, {**HELLO, "prompt": "y" * 600}, 400, "prompt", "got 600 tokens"),
        (COMPLETIONS, {**HELLO, "prompt": [[1], [1 << 40]]}, 400, "prompt[1]", "vocabulary"),
        ("/v1/responses", {"model": NAME, "input": [{"type": "image"}]}, 400, "input[0].type", "function_call"),
        ("/v1/responses", {"model": NAME, "input": "x", "background": True}, 400, "background", "not supported"),
        ("/v1/responses", {"model": NAME, "input": "x", "tools": [{"type": "mcp"}]}, 400, "tools[0].type", "function"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "x"}]}]}, 400, "input[0].content[0]", "text part"),
        (RESPONSES, {"input": [CALL, OUTCOME, {"role": "user"}]}, 400, "input[2].content", "expected text"),
        (RESPONSES, {"input": [{"role": "king", "content": "x"}]}, 400, "input[0].role", "'king'"),
        (RESPONSES, {"input": [CALL, {**OUTCOME, "output": 3}]}, 400, "input[1].output", "got int"),
        (RESPONSES, {"input": [{**CALL, "name": None}]}, 400, "input[0].name", "got NoneType"),
        (RESPONSES, {"input": "x" * 600}, 400, "input", "got 621 tokens"),
        (RESPONSES, {"input": "x", "instructions": "x" * 600}, 400, "input", "got 6"),
        (RESPONSES, {"input": "x", "prompt": {}, "background": 1}, 400, "background", "Expected `bool"),
        (RESPONSES, {"input": "x", "prompt": {"id": "x"}}, 400, "prompt", "not supported"),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "xml"}}}, 400, "text.format.type", "'xml'"),
        (
            RESPONSES,
            {"input": "x", "text": {"format": {"type": "json_schema"}}},
            400,
            "text.format.schema",
            "no schema",
        ),
        (RESPONSES, {"input": "x", "text": _text_format(UNBOUND)}, 400, "text.format.schema", "not"),
        (RESPONSES, {"input": "x", "tools": [{"type": "function", "name": "a b"}]}, 400, "tools[0].name", "letters"),
        (RESPONSES, {"input": "x", "tools": [_flat(UNBOUND)]}, 400, "tools[0].parameters", "not"),
        (RESPONSES, {"input": "x", "temperature": 1, "top_p": 2}, 400, "top_p", "at most 1"),
        ("/v1/embeddings", {"model": NAME, "input": "x"}, 400, None, "talker generates text and has no embeddings"),
        ("/v1/nothing", {}, 404, None, "expected one of /, /health, /metrics, /v1/models, /v1/models/NAME, /v1/chat/"),
        ("/v1/models", {}, 405, None, "got POST '/v1/models'; expected GET"),
    ],
)
def test_what_is_wrong_is_named(server: Server, path: str, body: Any, status: int, param: str | None, words: str):
    found, answer = server.post(path, body)
    error = answer["error"]
    assert (found, error["param"]) == (status, param) and words in error["message"], error
    assert error["type"] and "Traceback" not in error["message"]


def test_unknown_fields_are_ignored(server: Server):
    known = server.post(CHAT, _messages(USER, max_tokens=3))[1]["choices"]
    ignored = {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "nothing": [1], "store": None, "n": 1}
    assert server.post(CHAT, _messages(USER, max_tokens=3, **ignored))[1]["choices"] == known


@pytest.mark.parametrize(("path", "fields"), [(CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": "x"})])
def test_a_request_without_a_model_gets_the_only_one(server: Server, path: str, fields: Any):
    (named, first), (status, second) = (
        server.post(path, {**given, **fields, "max_tokens": 3}) for given in ({"model": NAME}, {})
    )
    assert (named, status) == (200, 200)
    assert second["choices"] == first["choices"] and second["model"] == NAME
    answer = server.post(RESPONSES, {"input": "x", "max_output_tokens": 1})[1]
    assert answer["model"] == NAME and answer["status"] == "incomplete"


def test_an_error_of_the_engine_has_the_requests_names(server: Server, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise UsageError("max_new_tokens", got="this", expected="that", fix="Change it.")

    monkeypatch.setattr(Engine, "add", refuse)
    for path, fields, name in (
        (CHAT, {"messages": [USER]}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": "x"}, "max_tokens"),
        (RESPONSES, {"input": "x"}, "max_output_tokens"),
    ):
        status, answer = server.post(path, fields)
        assert (status, answer["error"]["param"]) == (400, name)
        assert answer["error"]["message"].startswith(f"{name}: got this")
        (event,) = [each for each in server.events(path, {**fields, "stream": True}) if "message" in str(each)]
        told = event if path == RESPONSES else event["error"]
        assert told["param"] == name and told["message"].startswith(f"{name}: got this")
    monkeypatch.undo()


def test_an_overlong_prompt_is_refused_with_its_counts(server: Server):
    status, answer = server.post(CHAT, _messages({"role": "user", "content": "x" * 600}))
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert "got 621 tokens; expected at most 512" in answer["error"]["message"]
    assert "policy" not in answer["error"]["message"]  # of Python and `generate` alone


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(talking: Path):
    with served(talking) as server:
        status, answer = server.post(CHAT, _messages({"role": "user", "content": "x" * 2_000_000}))
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert "got 2,000,021 characters" in answer["error"]["message"]


def test_control_characters_are_text(server: Server):
    status, answer = server.post(CHAT, _messages({"role": "user", "content": "\0\x1b[2J\ufeff\u202e"}, max_tokens=3))
    assert status == 200 and answer["usage"]["completion_tokens"] == 3


def test_bodies_are_limited(server: Server):
    assert server.post(CHAT, b"x" * 20_001)[0] == 413
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    assert b" 413 " in server.raw(head + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n" + chunk * 6)
    assert b" 415 " in server.raw(head.replace(b"application/json", b"text/plain") + b"connection: close\r\n\r\n")
    assert b" 408 " in server.raw(head + b"connection: close\r\ncontent-length: 50\r\n\r\n{")


def test_headers_are_limited(server: Server):
    assert b" 400 " in server.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 9000)
    assert b" 400 " in server.raw(b"\x16\x03\x01\x00\x00\r\n\r\n")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(head + b"transfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n")
        assert b" 100 " in client.recv(4096)
        client.sendall(b"0\r\n" + b"x: y\r\n" * 900)  # headers behind a body
        assert b" 400 " in client.recv(4096)


def test_slow_clients_are_cut_off(server: Server):
    """Those that send their headers byte by byte, also after a request that was answered."""
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for first in (b"", request):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as slow:
            slow.sendall(first)
            if first:
                while b'"ok"' not in slow.recv(4096):
                    pass
            slow.sendall(b"GET")
            assert _is_closed(slow)


def test_a_client_that_takes_nothing_is_cut_off(talking: Path):
    """Its request ends, and its connection too."""
    with served(talking, Limits(send_s=0.3, stored_responses=1)) as server:
        server.serving._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = msgspec.json.encode({**HELLO, "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 20})
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            deaf.connect(("127.0.0.1", server.port))
            request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
            deaf.sendall(request)
            end = time.monotonic() + 30
            while "edgekv_disconnects_total 1" not in server.get("/metrics"):
                assert time.monotonic() < end
                time.sleep(0.05)
        assert server.post(COMPLETIONS, HELLO)[0] == 200


def test_a_server_out_of_files_says_so_in_a_sentence(talking: Path, tmp_path: Path):
    log = tmp_path / "log"
    with log.open("w") as stderr, ExitStack() as open_connections:
        command = [sys.executable, "-m", "edgekv", "serve", str(talking), "--port", "0", "-q"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().split("/v1")[0].rsplit(":", 1)[1])
            assert _is_healthy(port)
            limit = len(list(Path(f"/proc/{process.pid}/fd").iterdir())) + 2
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
            for _ in range(5):
                open_connections.enter_context(socket.create_connection(("127.0.0.1", port)))
            end = time.monotonic() + 30
            while not log.read_text():
                assert time.monotonic() < end
                time.sleep(0.05)
            open_connections.close()
            assert _is_healthy(port)
            process.terminate()
            assert process.wait(30) == 128 + signal.SIGTERM
        finally:
            process.kill()
            process.wait()
    text = log.read_text()
    assert text.count("\n") == 1, text
    assert "open files: got as many as the system allows" in text and "New connections wait" in text


def _is_healthy(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        return b" 200 " in connection.recv(4096)


def test_a_slow_template_holds_nobody_else_up(talking: Path, monkeypatch: pytest.MonkeyPatch):
    slow = ChatTemplates(
        templates={"default": "{% for i in range(800) %}{% set x = range(99999) | sum %}{% endfor %}x"}
    )
    with served(talking) as server, ThreadPoolExecutor() as threads:
        monkeypatch.setattr(server.model.engine.texts, "chat_templates", slow)
        chat = threads.submit(server.post, CHAT, _messages(USER, max_tokens=2))
        time.sleep(0.2)  # it is being rendered
        assert server.post(COMPLETIONS, HELLO)[0] == 200 and not chat.done()
        assert chat.result()[0] == 200


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
