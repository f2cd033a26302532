"""Work of requests off the event loop: nobody waits for what others have asked for, or for what nobody wants any more.

What blocks here does so until the test lets it go: no test depends on how long anything takes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest

import edgekv
from edgekv.engine import Engine, Request
from edgekv.errors import UsageError
from edgekv.pictures import PictureFile, PictureReader, TileGrid
from edgekv.serve import Limits
from edgekv.serve.errors import ApiError, DisconnectedError, stopping, timed_out
from edgekv.serve.http import Bodies, Exchange
from edgekv.serve.work import WorkQueue
from edgekv.spec.chat import ChatTemplates
from tests.edgekv.pictures.test_pictures import PICTURES
from tests.support.exports import export_options, exported
from tests.support.picture_models import data_uri, photo, png, write_smolvlm
from tests.support.serving import NAME, Server, served

CHAT = "/v1/chat/completions"
HELLO = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that is sure to happen."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


# A queue.


def _exchange(client: str = "a") -> Exchange:
    """A request of a client, without a socket."""
    scope: Any = {"state": {"record": None, "connection": None, "cycle": None}, "client": (client, 1)}
    nothing: Any = None
    return Exchange(scope, nothing, nothing, Limits(), Bodies(Limits(), has_pictures=False))


def test_clients_take_turns():
    """One that asks for much gets no more of a thread than one that asks for little."""
    done, go = list[str](), threading.Event()

    def work(name: str) -> Callable[[], None]:
        def wait() -> None:
            go.wait()
            done.append(name)

        return wait

    async def ask() -> None:
        queue, much, little = WorkQueue(8, {"text": 1}), _exchange("much"), _exchange("little")
        asked = [queue.run(much, "text", work(f"much {at}")) for at in range(4)]
        tasks = [asyncio.create_task(each) for each in (*asked, queue.run(little, "text", work("little")))]
        await asyncio.sleep(0)
        assert queue.waiting == 4
        go.set()
        await asyncio.gather(*tasks)

    asyncio.run(ask())
    assert done == ["much 0", "much 1", "little", "much 2", "much 3"]


def test_no_kind_of_work_waits_for_another():
    go = threading.Event()

    async def ask() -> None:
        queue = WorkQueue(8, {"text": 1, "pictures": 1})
        pictures = [asyncio.create_task(queue.run(_exchange(), "pictures", go.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        assert queue.waiting == 2 and await queue.run(_exchange(), "text", lambda: "read") == "read"
        go.set()
        await asyncio.gather(*pictures)

    asyncio.run(ask())


def test_what_a_client_may_have_waiting_is_limited():
    go = threading.Event()

    async def ask() -> None:
        queue = WorkQueue(2, {"text": 1})
        tasks = [asyncio.create_task(queue.run(_exchange(), "text", go.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match=r"The queue is full \(2 waiting\)"):
            await queue.run(_exchange(), "text", lambda: None)
        other = asyncio.create_task(queue.run(_exchange("b"), "text", lambda: "done"))
        await asyncio.sleep(0)
        go.set()
        assert await other == "done"
        await asyncio.gather(*tasks)

    asyncio.run(ask())


@pytest.mark.parametrize("error", [DisconnectedError(), timed_out(600), stopping()])
def test_the_end_of_a_request_ends_its_work(error: ApiError):
    """What is queued never begins; who waits for what runs is told at once, and what runs is stopped."""
    go, begun, stopped, begun_late = (threading.Event() for _ in range(4))

    async def ask() -> None:
        queue, running, queued = WorkQueue(8, {"text": 1}), _exchange(), _exchange("b")

        def work() -> None:
            with running.stopped_by(lambda _: stopped.set()):
                begun.set()
                go.wait()

        tasks = [
            asyncio.create_task(queue.run(running, "text", work)),
            asyncio.create_task(queue.run(queued, "text", begun_late.set)),
        ]
        await asyncio.to_thread(begun.wait)
        assert queue.waiting == 1
        for exchange in (queued, running):
            exchange.end(error)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert found == [error, error] and stopped.is_set() and queue.waiting == 0
        go.set()
        assert await queue.run(_exchange(), "text", lambda: "free again") == "free again"

    asyncio.run(ask())
    assert not begun_late.is_set()


def test_a_failure_is_that_of_its_own_work():
    def fail() -> None:
        raise KeyboardInterrupt  # such as a panic of a library: no Exception

    async def ask() -> None:
        queue = WorkQueue(8, {"text": 1})
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            await queue.run(_exchange(), "text", fail)
        assert await queue.run(_exchange(), "text", lambda: 3) == 3
        queue.close()
        with pytest.raises(ApiError, match="stopping"):
            await queue.run(_exchange(), "text", lambda: 3)

    asyncio.run(ask())


# A reader of pictures.


def test_a_reader_that_is_stopped_reads_nothing_more():
    file = PictureFile(png(photo(70, 45)), "picture", PICTURES)
    with PictureReader([file, file], 512) as reader:
        assert reader.grid(0) == TileGrid((70, 45), 3, 4)
        assert reader._child is not None
        os.kill(reader._child._process.pid, signal.SIGSTOP)  # it answers no more
        threading.Timer(0.01, reader.stop).start()
        with pytest.raises(UsageError, match="decoding ended with SIGKILL"):
            reader.open(1)
        with pytest.raises(UsageError, match="decoding ended with a stop"):
            reader.open(0)


# A server.


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that reads pictures."""
    return exported(write_smolvlm(tmp_path_factory.mktemp("vlm") / "smolvlm"), export_options(context=192, ar=(1, 16)))


@pytest.fixture(scope="module")
def server(seeing: Path) -> Iterator[Server]:
    with served(seeing) as server:
        yield server


def _shown(*pictures: bytes, text: str = "What?") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_uri(each)}} for each in pictures]
    content = [*parts, {"type": "text", "text": text}]
    return {**HELLO, "temperature": 0, "messages": [{"role": "user", "content": content}]}


class Gate:
    """Holds the decoding of pictures up."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun = list[int]()
        real = PictureReader.open

        def held(reader: PictureReader, number: int) -> Any:
            self.begun.append(len(reader._files))
            self.go.wait()
            return real(reader, number)

        patch.setattr(PictureReader, "open", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.go.set()


def _send(server: Server, body: Any) -> socket.socket:
    data = msgspec.json.encode(body)
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    client.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return client


def _status(client: socket.socket) -> int:
    answer = b""
    while part := client.recv(1 << 16):
        answer += part
    client.close()
    return int(answer.split()[1])


def test_nobody_waits_for_the_pictures_of_others(server: Server, gate: Gate):
    """However small the requests are, and however many of them there are."""
    clients = [_send(server, _shown(png(photo(9, 9, number)))) for number in range(5)]
    until(lambda: server.serving.service.work.waiting == 3 and len(gate.begun) == 2)
    assert '"queued":3' in server.get("/health")
    assert server.post(CHAT, HELLO)[0] == 200
    assert server.post(CHAT, {**HELLO, "response_format": {"type": "json_object"}})[0] == 200
    assert server.post("/v1/completions", {"model": NAME, "prompt": "x" * 5000})[0] == 400
    gate.go.set()
    assert [_status(each) for each in clients] == [200] * 5


def test_a_text_waits_for_no_templates(server: Server, monkeypatch: pytest.MonkeyPatch):
    """All templates of a model are rendered one after the other."""
    go, begun, real = threading.Event(), list[int](), ChatTemplates.render

    def held(*given: Any, **more: Any) -> str:
        begun.append(1)
        go.wait()
        return real(*given, **more)

    monkeypatch.setattr(ChatTemplates, "render", held)
    clients = [_send(server, HELLO) for _ in range(6)]
    until(lambda: len(begun) == 4 and server.serving.service.work.waiting == 2)
    assert server.post("/v1/completions", {"model": NAME, "prompt": "x", "max_tokens": 1})[0] == 200
    go.set()
    assert [_status(client) for client in clients] == [200] * 6


def test_pictures_of_clients_that_left_are_not_decoded(server: Server, gate: Gate):
    first = [_send(server, _shown(png(photo(9, 9, 20 + number)))) for number in range(2)]
    queue = server.serving.service.work
    until(lambda: gate.begun == [1, 1])
    left = [_send(server, _shown(png(photo(9, 9, 30)), png(photo(9, 9, 31 + number)))) for number in range(4)]
    until(lambda: queue.waiting == 4)
    for each in left:
        each.close()
    until(lambda: queue.waiting == 0)
    gate.go.set()
    assert [_status(each) for each in first] == [200] * 2
    assert _status(_send(server, _shown(png(photo(9, 9, 40))))) == 200
    assert gate.begun == [1, 1, 1]


def test_a_client_that_leaves_while_its_picture_is_decoded_costs_nothing_more(
    server: Server, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    """What decodes it ends, its next picture is not begun, and the engine never hears of it."""
    added, readers, work = list[Request](), list[PictureReader](), server.serving.service.work
    real, add = PictureReader.stop, Engine.add
    monkeypatch.setattr(Engine, "add", lambda engine, request: (added.append(request), add(engine, request))[1])
    monkeypatch.setattr(PictureReader, "stop", lambda reader: (real(reader), readers.append(reader))[0])
    client = _send(server, _shown(png(photo(9, 9, 80)), png(photo(9, 9, 81))))
    until(lambda: gate.begun == [2])
    client.close()
    until(lambda: len(readers) == 1)
    gate.go.set()
    until(lambda: work.idle)
    child = readers[0]._child
    assert child is not None and child._process.poll() is not None
    assert gate.begun == [2] and added == [] and '"queued":0' in server.get("/health")


@pytest.mark.parametrize("held_up", [(PictureReader, "open"), (ChatTemplates, "render")])
def test_slow_work_of_one_client_delays_no_token_of_another(
    seeing: Path, monkeypatch: pytest.MonkeyPatch, held_up: tuple[type, str]
):
    """However long it takes; and once it is done, the other still has a token in each step of the engine."""
    steps, go, begun = list[list[int]](), threading.Event(), threading.Event()
    real, step = getattr(*held_up), Engine.step

    def held(*given: Any, **more: Any) -> Any:
        begun.set()
        go.wait()
        return real(*given, **more)

    def watched(engine: Engine, only: Any = None) -> Any:
        if only is not None:  # a part of a step of all
            return step(engine, only)
        if len(steps) == 60:
            go.set()
            until(lambda: server.serving.service.engine.queued == 1)
        events = step(engine)
        steps.append([len(sequence.request.pictures) for sequence, _ in events])
        return events

    monkeypatch.setattr(*held_up, held)
    monkeypatch.setattr(Engine, "step", watched)
    with served(seeing) as server:
        slow = _send(server, _shown(png(photo(9, 9, 90))))
        assert begun.wait(60)
        status, answer = server.post(
            "/v1/completions", {"model": NAME, "prompt": "x", "max_tokens": 120, "ignore_eos": True}
        )
        assert status == 200 and answer["usage"]["completion_tokens"] == 120 and _status(slow) == 200
    assert [events.count(0) for events in steps[:120]] == [1] * 120
    assert {number for number, events in enumerate(steps) if 1 in events} <= {*range(60, 120)}


def test_a_server_stops_without_waiting_for_such_work(seeing: Path, gate: Gate):
    with served(seeing) as server:
        clients = [_send(server, _shown(png(photo(9, 9, number)))) for number in range(3)]
        until(lambda: server.serving.service.work.waiting == 1 and len(gate.begun) == 2)
    assert not gate.go.is_set() and [_status(each) for each in clients] == [503] * 3


def test_such_work_ends_with_the_deadline_of_its_request(seeing: Path, gate: Gate):
    with served(seeing, Limits(request_s=0.3)) as server:
        status, answer = server.post(CHAT, _shown(png(photo(9, 9))))
        assert (status, answer["error"]["code"]) == (504, "timeout") and not gate.go.is_set()


def test_pictures_that_do_not_fit_are_refused_undecoded(server: Server, monkeypatch: pytest.MonkeyPatch):
    opened = list[int]()
    monkeypatch.setattr(PictureReader, "open", lambda _, number: opened.append(number))
    many = [png(np.full((1, 1, 3), number, np.uint8)) for number in range(22)]
    status, answer = server.post(CHAT, _shown(*many))
    assert len(msgspec.json.encode(_shown(*many))) < 4096
    assert status == 400 and "got 772 tokens; expected at most 192" in answer["error"]["message"]
    damaged = png(photo(9, 9, 50))[:-40]
    status, answer = server.post(CHAT, _shown(damaged, b"no picture"))
    assert status == 400 and answer["error"]["param"] == "messages[0].content[1].image_url.url"
    assert opened == []


def test_the_pixels_of_a_request_are_limited(server: Server, monkeypatch: pytest.MonkeyPatch):
    """Files of few bytes may have many of them."""
    monkeypatch.setattr("edgekv.serve.chat.MAX_PIXELS", 2 * 70 * 45)
    two = [png(photo(70, 45, 60 + number)) for number in range(2)]
    assert server.post(CHAT, _shown(*two))[0] == 200
    status, answer = server.post(CHAT, _shown(*two, png(photo(1, 1))))
    assert status == 400 and answer["error"]["param"] == "messages[0].content[2].image_url.url"
    assert "got pictures of 6,301 pixels up to this one; expected at most 6,300" in answer["error"]["message"]


def test_a_picture_that_turns_out_to_be_turned_has_its_own_tokens(server: Server):
    """The EXIF of this PNG stands behind its pixels, where reading its headers does not get."""
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)

    turned = b"II*\x00\x08\x00\x00\x00\x01\x00\x12\x01\x03\x00\x01\x00\x00\x00\x06\x00\x00\x00\x00\x00\x00\x00"
    plain, tall = png(photo(90, 20)), png(np.rot90(photo(90, 20), -1))
    late = plain[:-12] + chunk(b"eXIf", turned) + plain[-12:]
    (first, one), (second, other) = (server.post(CHAT, _shown(each)) for each in (late, tall))
    assert (first, second) == (200, 200) and one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
    assert one["choices"] == other["choices"]


def test_the_event_loop_only_reads_and_writes(server: Server):
    """Whatever is asked for, and however short it is, nothing else of the product runs in its thread."""
    package, found = str(Path(edgekv.__file__).parent), set[str]()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package) and "/edgekv/serve/" not in file:
            found.add(f"{file.removeprefix(package)}: {frame.f_code.co_name}")
        reads = event == "c_call" and getattr(argument, "__module__", None) in ("msgspec._core", "binascii")
        if reads and not argument.__name__.endswith("encode"):
            found.add(f"{file.removeprefix(package)}: {argument.__name__}")

    assert server.get("/health")  # it runs
    loop = server.serving._server._loop
    assert loop is not None
    loop.call_soon_threadsafe(sys.setprofile, look)
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["a", "b"]}}}
    asked: list[tuple[str, Any]] = [
        (CHAT, {**HELLO, "n": 2, "logit_bias": {"1": 1}}),
        (CHAT, {**HELLO, "response_format": schema}),
        (CHAT, {**HELLO, "tools": [TOOL], "tool_choice": "required"}),
        (CHAT, {**HELLO, "messages": [{"role": "king"}]}),
        (CHAT, _shown(png(photo(9, 9, 70)))),
        ("/v1/completions", {"model": NAME, "prompt": ["a", "b"], "max_tokens": 2, "echo": True}),
        ("/v1/completions", {"model": NAME, "prompt": [[999999]]}),
        (
            "/v1/responses",
            {"model": NAME, "input": "Hello", "max_output_tokens": 2, "tools": [FLAT]},
        ),
        ("/v1/responses", {"model": f"{NAME}:nothing", "input": "Hello"}),
    ]
    for path, body in asked:
        assert server.post(path, body)[0] in (200, 400, 404)
    assert "model_not_found" in server.get(f"/v1/models/{NAME}:nothing")
    loop.call_soon_threadsafe(sys.setprofile, None)
    assert server.get("/health")
    assert found == set()


def test_the_queue_of_each_client_is_limited(seeing: Path, gate: Gate):
    """By its key, or by where it comes from."""
    with served(seeing, Limits(queue=2), keys=("one", "two")) as server:

        def send(number: int, key: str) -> socket.socket:
            data = msgspec.json.encode(_shown(png(photo(9, 9, number))))
            client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
            client.sendall(f"{head}authorization: Bearer {key}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
            return client

        queue = server.serving.service.work
        ones = list[socket.socket]()
        for number in range(4):
            ones.append(send(number, "one"))
            until(lambda: len(gate.begun) + queue.waiting == len(ones))
        assert _status(send(5, "one")) == 429
        other = send(6, "two")
        until(lambda: queue.waiting == 3)
        gate.go.set()
        assert [_status(each) for each in (*ones, other)] == [200] * 5
