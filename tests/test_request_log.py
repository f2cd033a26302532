"""A line for each request: what was asked, how it ended, its tokens and times."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import openai
import pytest

from edgekv.engine import Event, Sequence
from edgekv.errors import EngineError
from edgekv.serve.http import RequestRecord, write_line
from tests.serving import NAME, Server, served

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
KEY = "a-secret-key"


@pytest.fixture(scope="module")
def server(talking: Path) -> Iterator[Server]:
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
def test_an_answer_has_its_tokens_and_times(server: Server, log: list[str], stream: bool):
    client, prompt = server.client(KEY), f"{stream}, a prompt that is asked for twice"
    tokens = len(server.model.encode(prompt))
    for cached in (0, tokens - 1):
        answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=5, stream=stream)
        if stream:
            assert list(answer)
        counts = rf"{tokens} tokens in \({cached} cached\), 5 out"
        found = _line(log, rf"POST /v1/completions 200, {counts}, first token (\d+) ms, total (\d+) ms")
        assert int(found[1]) <= int(found[2])


def test_several_answers_are_one_line(server: Server, log: list[str]):
    usage = server.client(KEY).completions.create(model=NAME, prompt=["One", "Two"], max_tokens=4, n=2).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens
    counts = rf"{usage.prompt_tokens} tokens in \({cached} cached\), 16 out"
    _line(log, f"POST /v1/completions 200, {counts}, first token .*")


def test_refusals_say_why_and_no_secret(server: Server, log: list[str]):
    for path, headers, line in (
        ("/v1/models", "", "GET /v1/models 401, invalid_api_key, total "),
        ("/v1/models?key=x", f"authorization: Bearer {KEY}\r\n", "GET /v1/models 200, total "),
        ("/none%0A2026", f"authorization: Bearer {KEY}\r\n", "GET /none%0A2026 404, not_found, total "),
        ("/metrics", "", "GET /metrics 401, invalid_api_key, total "),
    ):
        server.raw(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n".encode())
        assert KEY not in _line(log, f"{re.escape(line)}.*")[0]
    bearer = {"authorization": f"Bearer {KEY}"}
    assert server.post("/v1/completions", {"model": NAME, "prompt": []}, **bearer)[0] == 400
    _line(log, "POST /v1/completions 400, invalid_request_error, total .*")


def test_probes_are_not_logged(server: Server, log: list[str]):
    assert "ok" in server.get("/health")
    server.raw(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    _line(log, "GET /v1/models 401.*")
    assert not [line for line in log if "/health" in line]


def test_a_client_that_leaves_is_logged(server: Server, log: list[str]):
    body = msgspec.json.encode({"model": NAME, "prompt": "Leaves", "max_tokens": 500, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(
            f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )
        while not server.serving.service.engine.running:
            time.sleep(0.001)
    _line(log, "POST /v1/completions 499, client left, 6 tokens in, .*")


def test_an_error_in_a_stream_is_logged(server: Server, log: list[str]):
    real, steps = Sequence.advance, 0

    def fail(sequence: Sequence, most: int | None = None) -> Event | None:
        nonlocal steps
        steps += 1
        if steps > 3:
            raise EngineError("engine", got="a fault", expected="a step", fix="Export again.")
        return real(sequence, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sequence, "advance", fail)
        stream = server.client(KEY).completions.create(model=NAME, prompt="Fails", stream=True)
        with pytest.raises(openai.APIError, match="log says why"):
            list(stream)
    _line(log, r"POST /v1/completions 200, engine_failed, 5 tokens in, [123] out, first token \d+ ms.*")


def test_what_is_not_known_is_left_out():
    record = RequestRecord(status=200)
    assert re.fullmatch(r"GET / 200, total \d+ ms", record.line("GET", "/"))
    record.prompt_tokens = 3
    record.count_token()
    assert "200, 3 tokens in, 1 out, first token 0 ms, total" in record.line("GET", "/")
