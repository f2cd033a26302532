"""A server process and a small client for measurements."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_END = b"\r\n0\r\n\r\n"
"""Of a body in chunks."""
_LISTENS = re.compile(r"http://127\.0\.0\.1:(\d+)/v1")


class ServerProcess:
    """`edgekv serve` in a process of its own, on a free port."""

    def __init__(self, bundle: Path, *options: str) -> None:
        command = [sys.executable, "-m", "edgekv", "serve", str(bundle), "--port", "0", "--name", "m", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        found = _LISTENS.search(self._process.stdout.readline())
        assert found, "the server does not start"
        self.port = int(found[1])

    def kill(self) -> None:
        """End it at once, as `kill -9` does."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """End it in order; returns its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def cpu_s(self) -> float:
        """Processor time of all threads so far."""
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(each.read_text().split()[0]) for each in threads) / 1e9

    def rss_bytes(self) -> int:
        """Resident memory."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Answer:
    """A streamed completion.

    Attributes:
        status: of HTTP.
        text: so far.
        tokens: the text of each token, if they were asked for.
        reason: why it ended; None if it was not read to its end.
        first_ms: from the request to the first byte of the answer.
        token_ms: from each event to the next.
    """

    status: int = 0
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    reason: str | None = None
    first_ms: float = 0.0
    token_ms: list[float] = field(default_factory=list)


async def complete(
    port: int, prompt: str | Sequence[int], most: int, leave_after: int | None = None, *, tokens: bool = False
) -> Answer:
    """Stream a greedy completion, with its tokens if they are wanted, or leave after some events.

    Raises:
        OSError: the server is gone, as asyncio reports it.
    """
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": most, "temperature": 0, "stream": True}
    if tokens:
        body["logprobs"] = 0
    answer, began, events = Answer(), time.perf_counter(), 0
    last = began
    async for event in _events(port, json.dumps(body).encode(), answer):
        now = time.perf_counter()
        if not events:
            answer.first_ms = (now - began) * 1e3
        else:
            answer.token_ms.append((now - last) * 1e3)
        last, events = now, events + 1
        if event is None:
            break
        choice = event["choices"][0]
        answer.text += choice["text"]
        answer.tokens += choice["logprobs"]["tokens"] if choice["logprobs"] else []
        answer.reason = choice["finish_reason"]
        if leave_after is not None and events >= leave_after and answer.reason is None:
            break
    return answer


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """When a client that only waits for bytes gets those of a stream.

    Attributes:
        headers_ms: from the request to the first byte.
        first_ms: from the request to the first token.
        token_ms: per further token.
    """

    headers_ms: float
    first_ms: float
    token_ms: float


def stream_times(
    port: int, prompt: str | Sequence[int], tokens: int, connection: socket.socket | None = None
) -> StreamTimes:
    """Times of a greedy stream of a number of tokens, on an open connection or, with its own time, on a new one.

    An event may have the text of several tokens; only its arrival is noted.
    """
    if connection is None:
        began = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port)) as opened:
            return _stream_times(opened, prompt, tokens, began)
    return _stream_times(connection, prompt, tokens, time.perf_counter())


def _stream_times(connection: socket.socket, prompt: str | Sequence[int], tokens: int, began: float) -> StreamTimes:
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    headers = first = last = 0.0
    end = b""
    while not end.endswith(_END):
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionResetError("the server has gone")
        now = time.perf_counter()
        headers = headers or now
        if b"data: {" in part:
            last = now
            first = first or last
        end = (end + part)[-len(_END) :]
    return StreamTimes((headers - began) * 1e3, (first - began) * 1e3, (last - first) * 1e3 / (tokens - 1))


async def metrics(port: int) -> dict[str, float]:
    """All samples without labels."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    lines = [line.split() for line in text.splitlines() if line.startswith("edgekv_") and "{" not in line]
    return {name.removeprefix("edgekv_"): float(value) for name, value in lines}


async def _events(port: int, body: bytes, answer: Answer) -> AsyncIterator[dict[str, Any] | None]:
    """The events of a streamed answer; None at its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer.status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        if answer.status != 200:
            return
        while True:
            line = await reader.readline()
            if not line:
                raise ConnectionResetError("the server has gone")
            if line.startswith(b"data: "):
                if line == b"data: [DONE]\n":
                    yield None
                    return
                yield json.loads(line[6:])
    except IndexError:
        raise ConnectionResetError("the server has gone") from None
    finally:
        writer.close()
