"""Conversations that share a model: turns, reuse, limits, clients that leave."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from msgspec import structs

import edgekv
from edgekv.engine import Sequence
from edgekv.engine.runner import Runner
from edgekv.errors import EngineError, UsageError
from edgekv.serve import Limits, answers
from edgekv.serve.http import WAITING
from edgekv.serve.responses import ResponseRecord, ResponseStore
from tests.support.processes import interruptible
from tests.support.serving import NAME, Server, served

TOOLS_READ = "edgekv.text.Tools.read"
LONG: dict[str, Any] = {"model": NAME, "max_tokens": 400, "extra_body": {"ignore_eos": True}}


def _ask(server: Server, prompt: str, key: str = "none", **options: Any) -> Any:
    return server.client(key).completions.create(**{"model": NAME, "prompt": prompt, "max_tokens": 8, **options})


def _cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def _metric(server: Server, name: str) -> float:
    (line,) = [line for line in server.get("/metrics").splitlines() if line.startswith(f"edgekv_{name} ")]
    return float(line.split()[1])


def _until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


class Gate:
    """Lets the engine's thread run a number of steps, so that what a test sees does not depend on time.

    Attributes:
        steps: the sequence of each step, in order.
    """

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self._allowed = threading.Semaphore(0)
        self._is_open = threading.Event()

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)

    def open(self) -> None:
        self._is_open.set()
        self._allowed.release()

    def wait(self, sequence: Any) -> None:
        if not self._is_open.is_set():
            assert self._allowed.acquire(timeout=30)
        self.steps.append(sequence)


@contextmanager
def _gate() -> Iterator[Gate]:
    gate, real = Gate(), Runner.run

    def run(runner: Runner, sequence: Sequence, end: int | None = None) -> Any:
        gate.wait(sequence)
        return real(runner, sequence, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", run)
        try:
            yield gate
        finally:
            gate.open()


def _jobs(server: Server) -> int:
    return server.serving.service.engine.running + server.serving.service.engine.queued


@pytest.fixture(scope="module")
def server(talking: Path) -> Iterator[Server]:
    with served(talking, Limits(sessions=3, queue=2)) as server:
        yield server


def test_requests_take_turns_token_by_token(server: Server):
    """A short one ends while a long one that came first goes on."""
    ended: list[str] = []

    def ask(prompt: str, tokens: int) -> None:
        _ask(server, prompt, max_tokens=tokens, extra_body={"ignore_eos": True})
        ended.append(prompt)

    with _gate() as gate:
        threads = [threading.Thread(target=ask, args=each) for each in (("Once", 200), ("Twice", 20))]
        for at, thread in enumerate(threads):
            thread.start()
            _until(lambda at=at: _jobs(server) == at + 1)
        gate.allow(60)
        threads[1].join()
        assert ended == ["Twice"]
        gate.open()
        threads[0].join()
    long = gate.steps[0]
    turns = [step is long for step in gate.steps]
    start = turns.index(False)
    assert turns[start : start + 39] == [False, True] * 19 + [False] and all(turns[start + 39 :])


def test_a_client_that_leaves_ends_its_request_within_a_step(server: Server):
    engine, disconnects = server.serving.service.engine, _metric(server, "disconnects_total")
    with _gate() as gate:
        gate.allow(3)
        stream = server.client().completions.create(prompt="Leaving", stream=True, **LONG)
        _until(lambda: len(gate.steps) == 3)
        (answer,) = engine._answers.values()
        stream.close()
        _until(lambda: answer.error is not None)
        gate.open()
        _until(lambda: _metric(server, "requests_running") == 0)
    assert len(gate.steps) <= 4 and _metric(server, "sessions_busy") == 0
    _until(lambda: _metric(server, "disconnects_total") == disconnects + 1)


def test_the_next_turn_computes_its_new_tokens_alone(server: Server):
    first = _ask(server, "A first turn of some length")
    tokens = server.model.encode("A first turn of some length")
    again = _ask(server, f"A first turn of some length{first.choices[0].text} and a second")
    assert _cached(again) >= len(tokens)
    assert _cached(_ask(server, "A first turn of some length")) == len(tokens) - 1


def test_the_queue_is_limited(server: Server):
    """Three run, two wait, and the next gets 429 with Retry-After."""
    with _gate() as gate:
        answers: list[Any] = []
        ask = [threading.Thread(target=lambda: answers.append(_ask(server, "Wait"))) for _ in range(5)]
        for thread in ask:
            thread.start()
        _until(lambda: _jobs(server) == 5)
        with pytest.raises(openai.RateLimitError, match=r"The queue is full \(2 waiting\)") as refused:
            _ask(server, "Too many")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        gate.open()
        for thread in ask:
            thread.join()
    assert len(answers) == 5 and len({answer.choices[0].text for answer in answers}) == 1


def test_the_answers_to_a_request_are_queued_together_or_not_at_all(server: Server):
    """Three run and two wait; a request for six answers is refused as a whole, and one for five is not."""
    with _gate() as gate:
        busy = threading.Thread(target=lambda: _ask(server, "Busy"))
        busy.start()
        _until(lambda: _jobs(server) == 1)
        with pytest.raises(openai.RateLimitError, match=r"no room for 5 answers \(0 waiting\)"):
            _ask(server, "Many", n=5)
        assert _jobs(server) == 1
        gate.open()
        busy.join()
    assert len(_ask(server, "Many", n=5).choices) == 5


def test_several_answers_compute_their_prompt_once(talking: Path):
    prompt = "A prompt of several answers that is longer than a block of the prefix cache"
    with served(talking, Limits(sessions=4)) as server:
        tokens = len(server.model.encode(prompt))
        answer = _ask(server, prompt, n=4, temperature=1, seed=1)
        assert answer.usage.prompt_tokens == tokens and answer.usage.completion_tokens == 32 and _cached(answer) == 0
        assert _metric(server, "prompt_tokens_total") == 4 * tokens
        assert _metric(server, "prompt_tokens_reused_total") >= 3 * (tokens - 32)
        assert _metric(server, "sessions_busy") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_all_its_answers(server: Server, stream: bool):
    disconnects = _metric(server, "disconnects_total")
    with _gate() as gate:
        body = msgspec.json.encode({"model": NAME, "prompt": "Leaves", "max_tokens": 400, "n": 3, "stream": stream})
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            gate.allow(3)
            _until(lambda: len(gate.steps) == 3)
            pending = [*server.serving.service.engine._answers.values()]
        _until(lambda: all(answer.error is not None for answer in pending))
        gate.open()
        _until(lambda: _jobs(server) == 0 and _metric(server, "sessions_busy") == 0)
    _until(lambda: _metric(server, "disconnects_total") == disconnects + 1)


async def _stream(port: int, body: dict[str, Any], leave_after: int) -> tuple[str, bool]:
    """The text of a streamed completion, and whether it is whole; the client leaves after some events, if not 0."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = msgspec.json.encode(body)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    text, events = "", 0
    try:
        assert b" 200 " in await reader.readline()
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if line.startswith(b"data: "):
                text += msgspec.json.decode(line[6:])["choices"][0]["text"]
                events += 1
                if events == leave_after:
                    return text, False
        return text, True
    finally:
        writer.close()


@pytest.mark.slow
def test_many_clients_of_whom_a_third_leaves_get_their_own_answers(talking: Path):
    """32 clients with 50 requests each: no answer is wrong or another's, and nothing is held at the end."""
    clients, requests, tokens = 32, 50, 5
    prompts = [f"{'Once upon ' * (at % 3)}{at}" for at in range(24)]
    with edgekv.load(talking, threads=1, reproducible=True) as alone:
        wanted = {
            (prompt, seed): "".join(
                token.text for token in alone.generate(prompt, tokens, temperature=1.0, seed=seed, ignore_eos=True)
            )
            for prompt in prompts
            for seed in range(3)
        }
    assert len(set(wanted.values())) > 50
    whole = left = 0

    async def ask(port: int, client: int) -> None:
        nonlocal whole, left
        draw = random.Random(client)
        for number in range(requests):
            prompt, seed = draw.choice(prompts), draw.randrange(3)
            body = {"prompt": prompt, "seed": seed, "temperature": 1.0, "max_tokens": tokens, "stream": True}
            leave_after = draw.randint(1, 2) if number % 3 == 2 else 0
            text, is_whole = await _stream(port, {**body, "ignore_eos": True}, leave_after)
            answer = wanted[prompt, seed]
            assert text == answer if is_whole else answer.startswith(text), (prompt, seed, text, answer)
            whole, left = whole + is_whole, left + (not is_whole)

    async def ask_all(port: int) -> None:
        await asyncio.gather(*(ask(port, client) for client in range(clients)))

    with served(talking, Limits(sessions=8, queue=clients), reproducible=True) as server:
        asyncio.run(ask_all(server.port))
        service = server.serving.service
        _until(lambda: _jobs(server) == 0 and _metric(server, "sessions_busy") == 0)
        ended = service.metrics.finished + sum(service.metrics.failed.values())
        assert ended == whole + left == clients * requests and left > clients * requests // 4
        assert set(service.metrics.failed) <= {"cancelled"}
        assert service.engine._answers == {} and service.work.idle and service.work.waiting == 0
        _until(lambda: not server.serving._server.server_state.tasks)


def test_an_allowed_page_can_read_that_the_queue_is_full(talking: Path):
    """And when to try again."""
    body = msgspec.json.encode({"model": NAME, "prompt": "Too many"})
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\norigin: http://page.example\r\nconnection: close\r\n"
    request = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    limits = Limits(sessions=1, queue=1)
    with served(talking, limits, origins=("http://page.example",)) as server, _gate() as gate:
        busy = [threading.Thread(target=lambda: _ask(server, "Wait")) for _ in range(2)]
        for thread in busy:
            thread.start()
        _until(lambda: _jobs(server) == 2)
        refused = server.raw(request).lower()
        gate.open()
        for thread in busy:
            thread.join()
    assert refused.startswith(b"http/1.1 429 ") and b"\r\nretry-after: 1\r\n" in refused
    assert b"\r\naccess-control-allow-origin: http://page.example\r\n" in refused
    assert b"\r\naccess-control-expose-headers: retry-after, " in refused


def test_a_request_that_waits_can_leave(server: Server):
    with _gate() as gate:
        busy = [threading.Thread(target=lambda: _ask(server, "Busy")) for _ in range(3)]
        for thread in busy:
            thread.start()
        _until(lambda: _jobs(server) == 3)
        with pytest.raises(openai.APITimeoutError):
            server.client().with_options(timeout=0.3).completions.create(model=NAME, prompt="Waits")
        gate.open()
        for thread in busy:
            thread.join()
    _until(lambda: _jobs(server) == 0)


def test_a_request_has_a_time_limit(talking: Path):
    with served(talking, Limits(request_s=0.05)) as server:
        real = Runner.run
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "run", lambda *given: (time.sleep(0.03), real(*given))[1])
            with pytest.raises(openai.InternalServerError, match="without an end") as ended:
                _ask(server, "Endless", **LONG)
        assert ended.value.status_code == 504
        _until(lambda: _metric(server, "sessions_busy") == 0)


def test_prefixes_never_cross_keys(talking: Path):
    with served(talking, keys=("first-key", "second-key")) as server:
        prompt = "A secret of the first key, of more than a block of tokens of the prefix cache"
        assert _cached(_ask(server, prompt, "first-key")) == 0
        assert _cached(_ask(server, prompt, "second-key")) == 0
        assert _cached(_ask(server, prompt, "first-key")) > 0
        mine = server.client("first-key").responses.create(model=NAME, input="Hello", max_output_tokens=2)
        with pytest.raises(openai.NotFoundError):
            server.client("second-key").responses.retrieve(mine.id)


def test_no_key_takes_the_room_of_anothers_responses(talking: Path):
    with served(talking, Limits(stored_responses=2), keys=("first-key", "second-key")) as server:
        first, second = (server.client(key).responses for key in ("first-key", "second-key"))
        wanted: dict[str, Any] = {"model": NAME, "input": "Hello", "max_output_tokens": 1}
        mine = first.create(**wanted)
        others = [second.create(**wanted) for _ in range(3)]
        assert first.retrieve(mine.id).id == mine.id and second.retrieve(others[2].id).id == others[2].id
        with pytest.raises(openai.NotFoundError):
            second.retrieve(others[0].id)
    store, record = ResponseStore(9, keys=100), ResponseRecord(id="x", created_at=0, model=NAME)
    store.add("first", record, ())
    for at in range(3):
        store.add("second", structs.replace(record, id=str(at)), ({"content": "x" * (2 << 20)},))
    assert store.get("first", "x") and len(store) == 2


def test_a_prefix_outlives_the_server(talking: Path, tmp_path: Path):
    prompt = "A conversation that goes on tomorrow, of more than a block of tokens"
    with served(talking, prefix_cache=tmp_path / "prefixes") as server:
        text = _ask(server, prompt).choices[0].text
    with served(talking, prefix_cache=tmp_path / "prefixes") as server:
        answer = _ask(server, prompt)
        assert _cached(answer) == len(server.model.encode(prompt)) - 1 and answer.choices[0].text == text


@pytest.mark.slow
def test_caches_stay_within_the_budget(talking: Path):
    with served(talking) as server:
        _ask(server, "One")
        size = int(_metric(server, "session_bytes"))
    with served(talking, budget=2 * size + 1) as server:
        texts = [_ask(server, f"{at} is a conversation").choices[0].text for at in range(6)]
        assert _metric(server, "sessions") == 2 and _metric(server, "session_bytes") == 2 * size
        assert texts == [_ask(server, f"{at} is a conversation").choices[0].text for at in range(6)]
    with served(talking, budget=size - 1) as server:
        with pytest.raises(openai.InternalServerError, match="memory budget") as refused:
            _ask(server, "One")
        assert refused.value.status_code == 503


@pytest.mark.parametrize("error", [RuntimeError("a bug"), BaseException("a panic")])
def test_a_failing_step_ends_its_request_alone(server: Server, error: BaseException):
    def fail(*_: Any) -> Any:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", fail)
        for n in (1, 3):
            with pytest.raises(openai.InternalServerError, match="This is a bug"):
                _ask(server, "Fails", n=n)
    _until(lambda: _jobs(server) == 0)
    assert _ask(server, "Goes on").choices[0].finish_reason and _metric(server, "sessions_busy") == 0


def test_a_client_is_not_told_of_the_servers_files(server: Server, capfd: pytest.CaptureFixture[str]):
    def fail(*_: Any) -> Any:
        raise EngineError("engine", got="a fault in /home/user/model", expected="a step", fix="Export again.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", fail)
        with pytest.raises(openai.InternalServerError, match="log says why") as told:
            _ask(server, "Fails")
    assert "/home/user" not in str(told.value) and "/home/user/model" in capfd.readouterr().err


def test_requests_end_with_the_server(talking: Path):
    answers: list[Any] = []

    def ask(server: Server) -> None:
        try:
            _ask(server, "Until the end", **LONG)
        except openai.InternalServerError as error:
            answers.append(error.status_code)

    with served(talking) as server, _gate() as gate:
        thread = threading.Thread(target=ask, args=(server,))
        thread.start()
        _until(lambda: _jobs(server) == 1)
        server.serving.stop()
        _until(lambda: server.serving.service.engine._is_closed)
        gate.open()
        thread.join()
    assert answers == [503]


def test_prompts_that_can_never_run_together_are_no_busy_queue(server: Server):
    """Three sessions and two places to wait: trying again would not help."""
    with pytest.raises(openai.BadRequestError, match="prompt: got 6 prompts; expected at most 5, which run or wait"):
        _ask(server, ["x"] * 6)
    assert len(_ask(server, ["x"] * 5).choices) == 5


STREAMS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
}


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_waits_is_not_silent(talking: Path, monkeypatch: pytest.MonkeyPatch, path: str):
    """Its headers come at once, and comments until its turn; the answer is that of a stream that need not wait."""
    monkeypatch.setattr(answers, "WAITING_S", 0.05)
    body = msgspec.json.encode({"model": NAME, "stream": True, **STREAMS[path]})
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    with served(talking, Limits(sessions=1)) as server, _gate() as gate:
        busy = threading.Thread(target=lambda: _ask(server, "Busy"))
        busy.start()
        _until(lambda: server.serving.service.engine.running == 1)  # its step keeps the engine from what comes later
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(request)
            answer = b""
            while answer.count(WAITING) < 2:
                answer += connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200 ") and b"text/event-stream" in answer
            gate.open()
            while piece := connection.recv(4096):
                answer += piece
        busy.join()
    assert b"delta" in answer or b'"text":' in answer
    assert b"[DONE]" in answer or b"response.incomplete" in answer


def test_a_stream_that_is_refused_has_a_status_and_one_that_fails_an_event(server: Server):
    with pytest.raises(openai.BadRequestError, match="logit_bias: got id 99999999"):
        _ask(server, "Refused", stream=True, logit_bias={"99999999": 1})

    def fail(*_: Any) -> Any:
        raise EngineError("engine", got="a fault", expected="a step", fix="Export again.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", fail)
        with pytest.raises(openai.APIError, match="log says why") as told:
            list(_ask(server, "Fails", stream=True))
        assert not isinstance(told.value, openai.APIStatusError)


@pytest.mark.parametrize(
    ("path", "fields", "read"),
    [
        ("/v1/completions", {"prompt": ["x " * 4000] * 2}, "edgekv.text.Texts.read"),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "x" * 60}}] * 99}, TOOLS_READ),
        ("/v1/responses", {"tools": [{"type": "function", "name": "x" * 60}] * 99}, TOOLS_READ),
    ],
)
def test_reading_a_long_request_holds_up_no_other(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], read: str
):
    reading, answered = threading.Event(), threading.Event()

    def wait(*_: Any, **__: Any) -> Any:
        reading.set()
        assert answered.wait(10), "the server answered nothing else"
        raise UsageError("prompt", got="this", expected="less", fix="Send less.")

    monkeypatch.setattr(read, wait)
    told: list[tuple[int, Any]] = []
    body = {"model": NAME, **STREAMS[path], **fields}
    long = threading.Thread(target=lambda: told.append(server.post(path, body)))
    long.start()
    assert reading.wait(10)
    assert "ok" in server.get("/health")
    answered.set()
    long.join()
    assert told[0][0] == 400


_SIGNALLED = """
import signal, threading, time
from edgekv.cli import main
from edgekv.serve import serving

def signal_own_thread():
    while not started.wait(0.01):
        pass
    time.sleep(0.5)  # the server sleeps by now
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

started, real = threading.Event(), serving.HttpServer.main_loop
serving.HttpServer.main_loop = lambda server: (started.set(), real(server))[1]
threading.Thread(target=signal_own_thread, daemon=True).start()
main()
"""


def test_a_signal_that_another_thread_gets_ends_the_server(talking: Path):
    command = [sys.executable, "-c", _SIGNALLED, "serve", str(talking), "--port", "0", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")


def test_clients_in_any_state_do_not_hold_up_the_end(talking: Path):
    """Idle, in the middle of headers or a body, waiting, or not reading their answers."""
    command = [sys.executable, "-m", "edgekv", "serve", str(talking), "--port", "0", "--name", NAME, "-q"]
    pipe = subprocess.PIPE
    long = {"model": NAME, "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 20}
    body = msgspec.json.encode(long)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    whole = head + f"content-length: {len(body)}\r\n\r\n".encode() + body
    states = (b"", b"GET /health HTT", head + b"content-length: 50\r\n\r\n{", whole, whole, whole)
    options = ["--max-sessions", "1", "--threads", "1"]
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}  # native code that crashes says where
    with (
        subprocess.Popen([*command, *options], stdout=pipe, stderr=pipe, text=True, env=environment) as process,
        ExitStack() as stack,
    ):
        try:
            assert process.stdout is not None and process.stderr is not None
            port = int(process.stdout.readline().split("/v1")[0].rsplit(":", 1)[1])
            for state in states:
                deaf = stack.enter_context(socket.socket())
                deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                deaf.connect(("127.0.0.1", port))
                deaf.sendall(state)
            time.sleep(1.5)  # the headers of those that wait are sent
            process.send_signal(signal.SIGTERM)
            ended = process.wait(20)
            assert (ended, process.stderr.read()) == (128 + signal.SIGTERM, "")
        finally:
            process.kill()


_STUCK = """
import sys, threading
import edgekv.engine.runner
from edgekv.cli import main
from edgekv.serve import serving

def step(*_):
    print("in a step", flush=True)
    threading.Event().wait()

edgekv.engine.runner.Runner.run = step
serving.ENGINE_S = float(sys.argv.pop(1))
main()
"""


@pytest.mark.parametrize(("limit_s", "signals"), [(0.2, 1), (600, 2)])
def test_a_step_that_never_ends_does_not_hold_up_the_end(talking: Path, limit_s: float, signals: int):
    command = [sys.executable, "-c", _STUCK, str(limit_s), "serve", str(talking), "--port", "0", "--name", NAME, "-q"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=interruptible) as process:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().split()[0]
        answers: list[Any] = []

        def ask() -> None:
            with pytest.raises(openai.InternalServerError) as told:
                openai.OpenAI(base_url=url, api_key="none", max_retries=0).completions.create(model=NAME, prompt="x")
            answers.append(told.value.status_code)

        client = threading.Thread(target=ask)
        client.start()
        assert process.stdout.readline() == "in a step\n"
        for _ in range(signals):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)  # two at once would be one
        try:
            assert process.wait(30) == 1
        finally:
            process.kill()
        client.join()
        assert answers == [503]
        assert process.stderr.read() == (
            "edgekv: error: engine: got a step that does not end; expected its end. "
            "End the process; what it has stored is whole.\n"
        )
