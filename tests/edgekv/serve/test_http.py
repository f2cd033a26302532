"""HTTP: what a request may be, who may ask, and a line of the log for each.

Bad input gets an answer that names the field, and no client can hold the server up.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from edgekv.cli import run
from edgekv.engine import Engine, Sequence
from edgekv.engine.runner import Runner
from edgekv.errors import EngineError, UsageError
from edgekv.serve import Limits, ServeOptions
from edgekv.serve.http import ApiKeys, RequestRecord, write_line
from edgekv.serve.options import accepted_keys, read_keys
from edgekv.spec.chat import ChatTemplates
from tests.support.serving import NAME, Server, served

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"model": NAME, "prompt": "Hello", "max_tokens": 2}
JSON = "content-type: application/json\r\n"


@pytest.fixture(scope="module")
def limited(talking: Path) -> Iterator[Server]:
    limits = Limits(body_bytes=20_000, header_bytes=4096, header_s=0.3, body_s=0.3, send_s=0.5)
    with served(talking, limits) as server:
        yield server


@pytest.fixture
def server(limited: Server) -> Iterator[Server]:
    """It still answers after each test."""
    yield limited
    assert limited.post(COMPLETIONS, HELLO)[0] == 200


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
        (CHAT, b'{"model": "\xff"}', 400, "body", "UTF-8"),
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
        (COMPLETIONS, {**HELLO, "prompt": []}, 400, "prompt", "an empty list"),
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
        ("/v1/models/NAME", {}, 405, None, "got POST '/v1/models/NAME'; expected GET"),
        ("/v1/responses/a/b", {}, 405, None, "expected DELETE or GET"),
    ],
)
def test_what_is_wrong_is_named(server: Server, path: str, body: Any, status: int, param: str | None, words: str):
    found, answer = server.post(path, body)
    error = answer["error"]
    assert (found, error["param"]) == (status, param) and words in error["message"], error
    assert error["type"] and "Traceback" not in error["message"]


@pytest.mark.parametrize("name", ["templates", "self", "source", "variables", "kept", "documents", "a b", ""])
def test_a_variable_of_the_template_may_have_any_other_name(server: Server, name: str):
    status, answer = server.post(CHAT, _messages(USER, chat_template_kwargs={name: 1}, max_tokens=1))
    assert status == 200, answer


def test_the_name_of_a_model_may_have_slashes_and_head_is_get_without_a_body(server: Server):
    head = "{} /v1/models/{} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert b"got 'org/model'" in server.raw(head.format("GET", "org/model").encode())
    answer = server.raw(head.format("HEAD", NAME).encode())
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\n")


def test_a_wrong_method_is_told_the_right_ones(server: Server):
    answer = server.raw(b"PUT /v1/responses/x HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 405 ") and b"\r\nallow: DELETE, GET\r\n" in answer


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


def test_a_target_may_be_a_whole_url_whose_host_counts(server: Server):
    for target, host, status in (
        (f"http://127.0.0.1:{server.port}/health", "example.com", 200),
        ("HTTP://localhost/health?x=1", "localhost", 200),
        ("http://example.com/health", "localhost", 403),
        ("http://localhost", "localhost", 200),  # the chat page
        ("http://localhost/nothing", "localhost", 404),
        ("ftp://localhost/health", "localhost", 404),
    ):
        request = f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        assert server.raw(request.encode()).startswith(f"HTTP/1.1 {status} ".encode()), target


def test_clients_of_other_versions_are_answered(server: Server):
    """HTTP/1.0 knows no chunks; and who asks for HTTP/2, as Java's client and curl can, gets HTTP/1.1."""
    body = msgspec.json.encode({**HELLO, "stream": True})
    for version, header in (("1.0", ""), ("1.1", "connection: upgrade, http2-settings\r\nupgrade: h2c\r\n")):
        head = f"POST {COMPLETIONS} HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n{header}"
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            answer = b""
            while b"[DONE]" not in answer and (part := client.recv(4096)):
                answer += part
        assert answer.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in answer
        assert (b"transfer-encoding: chunked" in answer.lower()) is (version == "1.1")


def test_requests_that_wait_for_an_earlier_answer_are_few(server: Server):
    """And a request that is none ends a connection without a word in the answer that is being sent."""
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    assert server.raw(request * 4 + last).count(b'"status":"ok"') == 5
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(request * 500)
        assert _is_closed(client)
    body = msgspec.json.encode({**HELLO, "max_tokens": 30, "ignore_eos": True, "stream": True})
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        answer = client.recv(100)
        client.sendall(b"no request\r\n\r\n")
        with suppress(ConnectionResetError):
            while part := client.recv(1 << 16):
                answer += part
        assert answer.startswith(b"HTTP/1.1 200 ") and b" 400 " not in answer


def test_the_body_of_a_request_that_offers_another_protocol_is_checked(server: Server):
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\n{JSON}connection: upgrade\r\nupgrade: h2c\r\n"
    chunked = head + "transfer-encoding: chunked\r\n\r\n"
    body = msgspec.json.encode(HELLO)
    for sent, status in (
        (chunked.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), b" 200 "),
        (chunked.encode() + b"no chunk\r\n", b" 400 "),
    ):
        assert status in server.raw(sent)[:20]


def test_no_token_waits_for_the_clients_acknowledgement(server: Server):
    """Nagle's algorithm would hold it back: 40 ms on a connection that has been used before."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        connections: Any = server.serving._server.server_state.connections
        accepted = [each.transport.get_extra_info("socket") for each in connections]
        assert accepted and all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in accepted)


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


def _half_closed(port: int, request: str, body: bytes = b"", version: str = "1.1") -> bytes:
    """What a client is sent that shuts down its sending side."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        head = f"{request} HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(1 << 16):
            answer += part
        return answer


def test_a_client_that_sends_no_more_is_answered(server: Server):
    """As of scripts with netcat; the connection ends with the answer."""
    body = msgspec.json.encode({**HELLO, "max_tokens": 30, "ignore_eos": True})
    stream = msgspec.json.encode({**HELLO, "max_tokens": 30, "ignore_eos": True, "stream": True})
    for version in ("1.1", "1.0"):
        assert b'"status":"ok"' in _half_closed(server.port, "GET /health", version=version)
        whole = _half_closed(server.port, f"POST {COMPLETIONS}", body, version)
        assert b" 200 " in whole and b'"completion_tokens":30' in whole
        assert whole.startswith(b"HTTP/1.1 102 ") is (version == "1.1")
        assert b"[DONE]" in _half_closed(server.port, f"POST {COMPLETIONS}", stream, version)
    two = "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /health"
    assert _half_closed(server.port, two).count(b'"status":"ok"') == 2
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: 9\r\n\r\nhalf".encode()
        )
        client.shutdown(socket.SHUT_WR)
        assert client.recv(4096) == b""


def test_idle_connections_make_room(talking: Path):
    """Also for others that are idle then; those that are busy stay, and `/health` is answered beside them."""
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with served(talking, Limits(connections=8, queue=32)) as server, ExitStack() as open_connections:

        def connect() -> socket.socket:
            return open_connections.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))

        idle = [connect() for _ in range(20)]
        assert all(map(_is_closed, idle[:12]))
        for each in idle[12:]:
            each.sendall(request)
            while b'"ok"' not in each.recv(4096):
                pass
        assert _is_healthy(server.port) and _is_closed(idle[12])
        connect()  # in place of the one that asked for health, which the server may have dropped by now
        assert server.post(COMPLETIONS, HELLO)[0] == 200 and _is_closed(idle[13])
        busy = [connect() for _ in range(8)]
        for each in busy:  # whose bodies never come
            each.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: 9\r\n\r\n".encode())
        tasks = server.serving._server.server_state.tasks
        while len(tasks) < 8:
            time.sleep(0.001)
        assert _is_healthy(server.port)
        status, answer = server.post(COMPLETIONS, HELLO)
        assert (status, answer["error"]["code"]) == (503, "busy")
        busy[0].close()
        while len(tasks) == 8:
            time.sleep(0.001)
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


# Who may ask.

GET = "GET {} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n{}\r\n"


def _status(server: Server, path: str = "/v1/models", host: str = "localhost", header: str = "") -> int:
    return int(server.raw(GET.format(path, host, header and header + "\r\n").encode()).split()[1])


def test_a_key_is_needed_if_there_are_some(talking: Path, capfd: pytest.CaptureFixture[str]):
    with served(talking, keys=("right", "other")) as server:
        assert _status(server) == 401 and _status(server, "/metrics") == 401
        assert _status(server, "/health") == 200
        for wrong in ("Bearer wrong", "Bearer ", "right", "Basic right", "Bearer right2", "Bearer \xff"):
            assert _status(server, header=f"authorization: {wrong}") == 401
        assert b"\r\nwww-authenticate: Bearer\r\n" in server.raw(GET.format("/v1/models", "localhost", "").encode())
        for right in ("Bearer right", "bearer other"):
            assert _status(server, header=f"authorization: {right}") == 200
        assert "right" not in server.get("/health") + repr(server.serving.service.engine)
    printed = capfd.readouterr()
    assert "right" not in printed.out + printed.err


def test_salts_tell_keys_apart_and_do_not_tell_them():
    keys = ApiKeys(["one", "two"])
    salts = {keys.salt(b"Bearer one"), keys.salt(b"Bearer two")}
    assert len(salts) == 2 and None not in salts and not any("one" in (salt or "") for salt in salts)
    assert keys.salt(None) is None and ApiKeys([]).are_required is False
    assert "secret" not in repr(ServeOptions(keys=("secret",)))


def test_a_file_of_keys(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("# mine\nfirst\n\n second \n")
    assert read_keys(path) == ("first", "second")
    for content, found in (("", "no key"), ("a b", "other characters"), ("\u00e9", "other characters")):
        path.write_text(content)
        with pytest.raises(UsageError, match=found):
            read_keys(path)
    with pytest.raises(UsageError, match="a file of API keys"):
        read_keys(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        read_keys(tmp_path / "pipe")


def test_a_key_and_a_file_of_keys_add_up(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("first\nsecond\n")
    assert accepted_keys(None, None) == () and accepted_keys("mine", None) == ("mine",)
    assert accepted_keys("mine", path) == ("mine", "first", "second")
    for wrong in ("", "a b", "tab\t", "\u00e9"):
        with pytest.raises(UsageError, match="API key: got") as refused:
            accepted_keys(wrong, None)
        assert not wrong or wrong not in str(refused.value)


def test_the_key_of_the_environment_is_needed(talking: Path):
    """Only that of the command line if both are given, and neither is printed."""
    command = [sys.executable, "-m", "edgekv", "serve", str(talking), "--port", "0", "--threads", "1"]
    for options, accepted, refused in (
        ([], "from-env", "from-line"),
        (["--api-key", "from-line"], "from-line", "from-env"),
    ):
        process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "EDGEKV_API_KEY": "from-env"},
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0]
            assert openai.OpenAI(base_url=url, api_key=accepted).models.list().data
            with pytest.raises(openai.AuthenticationError, match="no accepted key"):
                openai.OpenAI(base_url=url, api_key=refused).models.list()
        finally:
            process.terminate()
            assert process.stdout is not None
            printed = process.stdout.read()
            process.wait(30)
        assert "from-" not in printed and "API keys   1\n" in printed
        assert "GET /v1/models 401, invalid_api_key, total" in printed


def test_a_foreign_page_cannot_reach_a_local_server(talking: Path):
    """Neither under a name of its own that resolves to this machine, nor by asking across origins."""
    with served(talking) as server:
        assert _status(server, host="evil.example") == 403 and _status(server, host="") == 403
        for host in ("127.0.0.1", f"localhost:{server.port}", "[::1]:80", "LOCALHOST"):
            assert _status(server, host=host) == 200
        answer = server.raw(GET.format("/v1/models", "localhost", "origin: http://evil.example\r\n").encode())
        assert b"access-control" not in answer.lower()


def test_an_origin_that_is_allowed(talking: Path):
    with served(talking, origins=("http://page.example",), keys=("k",)) as server:
        for origin, is_allowed in (("http://page.example", True), ("http://evil.example", False)):
            head = f"OPTIONS /v1/models HTTP/1.1\r\nhost: localhost\r\norigin: {origin}\r\nconnection: close\r\n"
            answer = server.raw(f"{head}access-control-request-method: GET\r\n\r\n".encode())
            assert (b"access-control-allow-origin: " + origin.encode() in answer) is is_allowed


def test_an_allowed_page_can_read_refusals(talking: Path):
    """Without the headers of CORS a browser shows it a failed connection, not the status."""
    allowed = b"access-control-allow-origin: http://page.example"
    with served(talking, origins=("http://page.example",), keys=("k",)) as server:
        for path, header, status in (("/v1/models", "", b" 401 "), ("/no", "authorization: Bearer k\r\n", b" 404 ")):
            answer = server.raw(GET.format(path, "localhost", f"origin: http://page.example\r\n{header}").encode())
            assert status in answer and allowed in answer


def test_a_server_for_all_without_keys_warns(
    talking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "keys").write_text("mine")
    monkeypatch.delenv("EDGEKV_API_KEY", raising=False)
    wrong = ["serve", str(talking), "--cache-budget", "lots"]  # refused before it would serve
    for options, warns in (([], False), (["--host", "0.0.0.0"], True)):
        assert run([*wrong, *options]) == 2
        assert ("warning: --host 0.0.0.0 without API keys" in capsys.readouterr().err) is warns
    for keys in (["--api-key-file", str(tmp_path / "keys")], ["--api-key", "mine"]):
        assert run([*wrong, "--host", "0.0.0.0", *keys]) == 2
        assert "warning" not in capsys.readouterr().err
    monkeypatch.setenv("EDGEKV_API_KEY", "mine")
    assert run([*wrong, "--host", "0.0.0.0"]) == 2
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "--port: got 70000"),
        (["--max-sessions", "0"], "--max-sessions: got 0"),
        (["--timeout", "0"], "--timeout: got 0"),
        (["--cache-budget", "lots"], "--cache-budget: got 'lots'"),
        (["--api-key", "a b"], "API key: got other characters"),
        (["--api-key-file", "nowhere"], "nowhere: got No such file"),
        (["--kv-growth", "together"], "No such option '--kv-growth'"),  # the budget counts on caches of one size
        (["--host", "no.such.host.invalid"], "--host: got no.such.host.invalid: "),
    ],
)
def test_options_are_checked(talking: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert run(["serve", str(talking), *options]) == 2
    assert words in capsys.readouterr().err


def test_limits_are_checked():
    for wrong in ({"queue": 0}, {"send_s": float("nan")}, {"header_s": float("inf")}):
        with pytest.raises(UsageError):
            Limits(**wrong)  # type: ignore[arg-type]


# The log.

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
KEY = "a-secret-key"


@pytest.fixture(scope="module")
def logged(talking: Path) -> Iterator[Server]:
    with served(talking, logs_requests=True, keys=(KEY,)) as server:
        yield server


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that the server writes. pytest's capture loses what another thread writes while it is read."""
    lines: list[str] = []
    monkeypatch.setattr("edgekv.serve.http.write_line", lines.append)
    return lines


def _line(log: list[str], pattern: str) -> re.Match[str]:
    """The line that a pattern fits; it may come a moment after the answer."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if fitting := [found for each in log if (found := re.fullmatch(pattern, each))]:
            assert len(fitting) == 1, log
            return fitting[0]
        time.sleep(0.005)
    raise AssertionError(f"{pattern} is not in {log}")


def test_a_line_has_the_time_of_day(capsys: pytest.CaptureFixture[str]):
    write_line("GET / 200")
    assert re.fullmatch(TIME + "GET / 200\n", capsys.readouterr().err)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_its_tokens_and_times(logged: Server, log: list[str], stream: bool):
    client, prompt = logged.client(KEY), f"{stream}, a prompt that is asked for twice"
    tokens = len(logged.model.encode(prompt))
    for cached in (0, tokens - 1):
        answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=5, stream=stream)
        if stream:
            assert list(answer)
        counts = rf"{tokens} tokens in \({cached} cached\), 5 out"
        found = _line(log, rf"POST /v1/completions 200, {counts}, first token (\d+) ms, total (\d+) ms")
        assert int(found[1]) <= int(found[2])


def test_several_answers_are_one_line(logged: Server, log: list[str]):
    usage = logged.client(KEY).completions.create(model=NAME, prompt=["One", "Two"], max_tokens=4, n=2).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens
    counts = rf"{usage.prompt_tokens} tokens in \({cached} cached\), 16 out"
    _line(log, f"POST /v1/completions 200, {counts}, first token .*")


def test_refusals_say_why_and_no_secret(logged: Server, log: list[str]):
    for path, headers, line in (
        ("/v1/models", "", "GET /v1/models 401, invalid_api_key, total "),
        ("/v1/models?key=x", f"authorization: Bearer {KEY}\r\n", "GET /v1/models 200, total "),
        ("/none%0A2026", f"authorization: Bearer {KEY}\r\n", "GET /none%0A2026 404, not_found, total "),
        ("/metrics", "", "GET /metrics 401, invalid_api_key, total "),
    ):
        logged.raw(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n".encode())
        assert KEY not in _line(log, f"{re.escape(line)}.*")[0]
    bearer = {"authorization": f"Bearer {KEY}"}
    assert logged.post("/v1/completions", {"model": NAME, "prompt": []}, **bearer)[0] == 400
    _line(log, "POST /v1/completions 400, invalid_value, total .*")


def test_probes_are_not_logged(logged: Server, log: list[str]):
    assert "ok" in logged.get("/health")
    logged.raw(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    _line(log, "GET /v1/models 401.*")
    assert not [line for line in log if "/health" in line]


@pytest.mark.parametrize(("space", "stream"), [(0, False), (200_000, False), (0, True)])
def test_a_client_that_leaves_is_logged(logged: Server, log: list[str], space: int, stream: bool):
    """Also behind a long body, at which uvicorn stops to read, and in the middle of a stream."""
    asked = {"model": NAME, "prompt": "Leaves", "max_tokens": 500, "ignore_eos": True, "stream": stream}
    body = msgspec.json.encode(asked) + b" " * space
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
    with socket.create_connection(("127.0.0.1", logged.port), timeout=10) as connection:
        connection.sendall(
            f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )
        while not (connection.recv(1) if stream else logged.serving.service.engine.running):
            time.sleep(0.001)
    _line(log, f"POST /v1/completions {200 if stream else 499}, client left, 6 tokens in, .*")


def test_an_error_in_a_stream_is_logged(logged: Server, log: list[str]):
    real, steps = Runner.run, 0

    def fail(runner: Runner, sequence: Sequence, end: int | None = None) -> Any:
        nonlocal steps
        steps += 1
        if steps > 3:
            raise EngineError("engine", got="a fault", expected="a step", fix="Export again.")
        return real(runner, sequence, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", fail)
        stream = logged.client(KEY).completions.create(model=NAME, prompt="Fails", stream=True)
        with pytest.raises(openai.APIError, match="log says why"):
            list(stream)
    _line(log, r"POST /v1/completions 200, engine_failed, 5 tokens in, [123] out, first token \d+ ms.*")


def test_what_is_not_known_is_left_out():
    record = RequestRecord(status=200)
    assert re.fullmatch(r"GET / 200, total \d+ ms", record.line("GET", "/"))
    record.prompt_tokens = 3
    record.count_token()
    assert re.search(r"200, 3 tokens in, 1 out, first token \d+ ms, total", record.line("GET", "/"))
