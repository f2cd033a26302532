"""A server under load: right answers, nothing leaked, and what the server adds to the engine.

    python -m benchmarks.serve_load [BUNDLE] [--clients 32] [--requests 50] [--soak SECONDS]

The embedded model with a context of 512. Each client sends its requests one after the other: pieces of a text of mixed
lengths, some of which begin alike. A third leaves in the middle of the answer. Each finished answer is compared with
that of the same prompt alone in an empty cache, in the CPU engine's mode `emulate`. Where they differ, the two
candidates must be as good as tied: sums are added up in another order when a prompt is continued. `--soak` repeats
this for some time and ends the server with SIGKILL in between; the next one starts on the same prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

import edgekv
from benchmarks.serving import Answer, ServerProcess, complete, metrics, stream_times
from benchmarks.ttft import CHECKPOINT, export
from edgekv.prefix import StoreConfig

EXACT = ("--threads", "1", "--cpu-mode", "emulate")
TIED_STEPS = 64  # of 65,536: cache rows that were computed in another chunk are some steps apart themselves
SESSIONS = 12


@dataclass(frozen=True, slots=True)
class Ask:
    """A request."""

    prompt: str
    tokens: int
    leave_after: int | None


@dataclass(slots=True)
class Tally:
    """What came of the requests."""

    finished: list[tuple[Ask, Answer]] = field(default_factory=list)
    left: int = 0
    refused: int = 0
    broken: int = 0


def make_asks(count: int, seed: int) -> list[Ask]:
    """Requests of mixed lengths; a third leaves."""
    text = (CHECKPOINT / "heldout.txt").read_text()
    draw = random.Random(seed)
    starts = [draw.randrange(len(text) // 2) for _ in range(24)]
    asks = []
    for _ in range(count):
        start, tokens = draw.choice(starts), draw.randint(2, 40)
        prompt = text[start : start + draw.choice((20, 80, 200, 400, 700))] + draw.choice(("", "", "\n", " x"))
        asks.append(Ask(prompt, tokens, draw.randint(1, tokens) if draw.random() < 1 / 3 else None))
    return asks


async def run_load(port: int, asks: list[Ask], clients: int, until: float | None = None) -> Tally:
    """Send the requests from several clients at once."""
    tally, waiting = Tally(), list(reversed(asks))

    async def client() -> None:
        while waiting and (until is None or time.perf_counter() < until):
            ask = waiting.pop()
            try:
                answer = await complete(port, ask.prompt, ask.tokens, ask.leave_after, tokens=True)
            except OSError:
                tally.broken += 1
                if until is None:
                    raise
                await asyncio.sleep(0.05)
                continue
            if answer.status != 200:
                tally.refused += 1
            elif answer.reason is None:
                tally.left += 1
            else:
                tally.finished.append((ask, answer))

    await asyncio.gather(*(client() for _ in range(clients)))
    return tally


class Judge:
    """Compares answers with those of the model alone."""

    def __init__(self, model: edgekv.Model) -> None:
        self._model = model
        self.ties: list[float] = []
        self.wrong: list[str] = []

    def check(self, ask: Ask, answer: Answer) -> None:
        """Count an answer as equal, tied or wrong."""
        model = self._model
        prompt, said = model.encode(ask.prompt), list[int]()
        while len(said) < len(answer.tokens):
            alone = [token.id for token in model.generate([*prompt, *said], max_new_tokens=ask.tokens - len(said))]
            alone = alone[:-1] if alone[-1] in model.bundle.manifest.tokens.eos else alone
            rest = answer.tokens[len(said) :]
            names = [self._name(token) for token in alone]
            at = next((at for at, (one, other) in enumerate(zip(names, rest, strict=False)) if one != other), None)
            if at is None:
                if len(names) != len(rest):
                    self.wrong.append(f"{ask.prompt[-20:]!r}: {len(rest)} tokens, alone {len(names)}")
                return
            said += alone[:at]
            logits = model.score([*prompt, *said])[-1]
            steps = (logits.max() - logits) / model.bundle.manifest.encodings["logits"].scale
            near = [int(each) for each in steps.argsort()[:20] if self._name(int(each)) == rest[at]]
            if not near or steps[near[0]] > TIED_STEPS:
                gap = f"{steps[near[0]]:.0f}" if near else "many"
                self.wrong.append(f"{ask.prompt[-20:]!r}: {rest[at]!r} is not {names[at]!r}, {gap} steps apart")
                return
            self.ties.append(float(steps[near[0]]))
            said.append(near[0])

    def _name(self, token: int) -> str:
        return str(self._model.tokenizer.decode([token], skip_special_tokens=False))


@dataclass(frozen=True, slots=True)
class Overhead:
    """What the server adds to the model in Python: medians in ms, for a client that only waits for bytes.

    Attributes:
        new_headers: from a request, with the connection, to its first byte, right after another request.
        open_headers: the same on an open connection; which of both comes first alternates.
        first: to the first token, with the connection.
        token: per token.
        token_cpu: processor time per token.
    """

    new_headers: float
    open_headers: float
    first: float
    token: float
    token_cpu: float


def overhead(bundle: Path, server: ServerProcess, rounds: int) -> Overhead:
    """Streams of the server and generations of the model by turns."""
    prompt = (CHECKPOINT / "heldout.txt").read_text()[1000:1100]
    found = []
    address = "127.0.0.1", server.port
    with (
        edgekv.load(bundle, threads=1, prefix_cache=StoreConfig()) as model,
        socket.create_connection(address) as connection,
    ):
        for number in range(rounds + 1):
            began, cpu, times = time.perf_counter(), time.process_time(), []
            for _ in model.generate(prompt, 41, sequence=1, ignore_eos=True, temperature=0):
                times.append(time.perf_counter())
            alone = [(times[0] - began) * 1e3, *((b - a) * 1e3 for a, b in pairwise(times))]
            cpu, before = time.process_time() - cpu, server.cpu_s()
            streamed = stream_times(server.port, prompt, 41)
            spent = (server.cpu_s() - before - cpu) * 1e3 / len(times)
            headers = {
                is_open: stream_times(server.port, prompt, 2, connection if is_open else None).headers_ms
                for is_open in (number % 2 == 0, number % 2 == 1)
            }
            first, token = streamed.first_ms - alone[0], streamed.token_ms - statistics.fmean(alone[1:])
            if number:  # the first round fills the caches
                found.append((headers[False], headers[True], first, token, spent))
    return Overhead(*(statistics.median(each) for each in zip(*found, strict=True)))


def second_turn(bundle: Path, folder: Path) -> dict[str, float]:
    """Time to the first token of a turn behind 400 tokens: alone, from the cache, and after a restart."""
    text = (CHECKPOINT / "heldout.txt").read_text()
    with edgekv.load(bundle, threads=1) as model:
        tokens = model.encode(text[: 1 << 14])
    options = (*EXACT, "--prefix-cache", str(folder))
    times: dict[str, list[float]] = {"without reuse": [], "second turn": [], "after a restart": []}
    turns = [(tokens[at : at + 400], tokens[at + 2000 : at + 2008]) for at in range(0, 1500, 300)]
    server = ServerProcess(bundle, *options)
    for first, added in turns:
        times["without reuse"].append(stream_times(server.port, first, 4).first_ms)
        times["second turn"].append(stream_times(server.port, [*first, *added], 2).first_ms)
    server.stop()
    server = ServerProcess(bundle, *options)
    asyncio.run(complete(server.port, "warm", 2))
    for first, added in turns:
        times["after a restart"].append(stream_times(server.port, [*first, *added], 2).first_ms)
    server.stop()
    return {name: statistics.median(each) for name, each in times.items()}


def soak(bundle: Path, folder: Path, seconds: float, clients: int) -> tuple[Tally, int]:
    """Load for some time, with the server killed in between; all answers, and how often it was killed."""
    end, total, kills = time.perf_counter() + seconds, Tally(), 0
    draw = random.Random(5)
    while time.perf_counter() < end:
        server = ServerProcess(bundle, *EXACT, "--prefix-cache", str(folder), "--max-sessions", str(SESSIONS))
        span = min(draw.uniform(5, 20), end - time.perf_counter())

        async def one(port: int, span: float, seed: int, server: ServerProcess = server) -> Tally:
            load = asyncio.create_task(run_load(port, make_asks(10_000, seed), clients, time.perf_counter() + span))
            await asyncio.sleep(max(0.5, span - 1))
            server.kill()
            return await load

        tally = asyncio.run(one(server.port, span, kills))
        kills += 1
        total.finished += tally.finished
        total.left += tally.left
        total.broken += tally.broken
    server = ServerProcess(bundle, *EXACT, "--prefix-cache", str(folder))
    answers = asyncio.run(run_load(server.port, make_asks(20, 1), 4))
    total.finished += answers.finished
    rejected = asyncio.run(metrics(server.port))["prefix_cache_rejected_files_total"]
    assert rejected == 0, f"{rejected} broken files in the prefix cache"
    assert server.stop() == 143
    return total, kills


def load_table(bundle: Path, clients: int, requests: int, folder: Path, judge: Judge) -> Table:
    options = (*EXACT, "--max-sessions", str(SESSIONS), "--max-queue", str(clients))
    server = ServerProcess(bundle, *options, "--prefix-cache", str(folder))
    asyncio.run(run_load(server.port, make_asks(20, 99), 4))
    before = server.rss_bytes()
    began = time.perf_counter()
    tally = asyncio.run(run_load(server.port, make_asks(clients * requests, 0), clients))
    took = time.perf_counter() - began
    time.sleep(0.5)
    held = asyncio.run(metrics(server.port))
    cpu = server.cpu_s()
    time.sleep(10)
    idle = server.cpu_s() - cpu
    after = server.rss_bytes()
    added = overhead(bundle, server, 15)
    server.stop()
    for ask, answer in tally.finished:
        judge.check(ask, answer)
    table = Table(title=f"{clients} clients x {requests} requests", show_header=False)
    for name, value in (
        ("finished, left, refused", f"{len(tally.finished)}, {tally.left}, {tally.refused}"),
        ("wrong or crossed answers", f"{len(judge.wrong)}"),
        ("ties, widest in steps", f"{len(judge.ties)}, {max(judge.ties, default=0):.1f}"),
        ("tokens per second", f"{held['generated_tokens_total'] / took:.0f}"),
        ("prompt tokens reused", f"{held['prompt_tokens_reused_total'] / held['prompt_tokens_total']:.0%}"),
        ("running, queued, busy sessions at the end", ", ".join(f"{held[each]:.0f}" for each in _RUNNING)),
        ("sessions kept, MiB", f"{held['sessions']:.0f}, {held['session_bytes'] / 2**20:.1f}"),
        ("resident memory before and after, MiB", f"{before / 2**20:.0f}, {after / 2**20:.0f}"),
        ("processor time in 10 s of idling, ms", f"{idle * 1e3:.0f}"),
        (
            "first byte, on a new connection and on an open one, ms",
            f"{added.new_headers:.2f}, {added.open_headers:.2f}",
        ),
        ("first token beyond the engine, ms", f"{added.first:.2f}"),
        ("token beyond the engine, ms", f"{added.token:.3f}"),
        ("processor time of a token beyond the engine, ms", f"{added.token_cpu:.3f}"),
    ):
        table.add_row(name, value)
    return table


_RUNNING = ("requests_running", "requests_queued", "sessions_busy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", type=Path)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--soak", type=float, metavar="SECONDS")
    given = parser.parse_args()
    console = Console(width=160)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        bundle = given.bundle or export(folder / "bundle")
        with edgekv.load(bundle, threads=1) as model:
            judge = Judge(model)
            if given.soak:
                tally, kills = soak(bundle, folder / "prefixes", given.soak, given.clients)
                for ask, answer in tally.finished:
                    judge.check(ask, answer)
                console.print(
                    f"{kills} kills, {len(tally.finished)} answers finished, {tally.broken} broken off by a kill, "
                    f"{len(judge.wrong)} wrong, {len(judge.ties)} ties (widest {max(judge.ties, default=0):.1f} steps)"
                )
            else:
                console.print(load_table(bundle, given.clients, given.requests, folder / "prefixes", judge))
                times = second_turn(bundle, folder / "turns")
                for name, ms in times.items():
                    console.print(f"{name:16} {ms:7.2f} ms to the first token, {times['without reuse'] / ms:.1f} x")
        for line in judge.wrong[:10]:
            console.print(line, markup=False)
        if judge.wrong:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
