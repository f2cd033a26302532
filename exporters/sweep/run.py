"""Carries the pieces of a sweep out on a Dask cluster."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed import Client, Future, KilledWorker

from edgekv.child import TIMEOUT_VARIABLE, vendor_timeout_s
from edgekv.errors import ServiceError, UsageError
from exporters.progress import Progress
from exporters.sweep.fitness import RAM, TOPIC, Fitness, FitWorkers, looking
from exporters.sweep.limit import within
from exporters.sweep.piece import Piece, Plan, hashed
from exporters.sweep.store import PieceStore

_POLL_S = 0.1
_LOOK_S = 1.0
_JOIN_S = 30.0  # of the first worker
_PATIENCE_S = 60.0
_ANSWER_S = 60.0  # of a scheduler
_LOOK_AT_S = 1800.0  # of workers: each may fetch the checkpoint first
_CANCEL_S = 10.0
_ALL = 1_000_000  # workers
_UNREAD = "deserialization of the task graph"  # in Dask's message
_AGAIN = "Start them and run the same command again: finished pieces are not done again."

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """A piece that failed, and why."""

    kind: str
    error: BaseException


def unfinished(plan: Plan, store: PieceStore, targets: Sequence[str]) -> dict[str, Piece]:
    """The pieces to do for these targets: without what is finished, and without all that only it needs."""
    wanted, waiting, known = set[str](), [*targets], set[str]()
    while waiting:
        key = waiting.pop()
        if key in known:
            continue
        known.add(key)
        if store.find(key) is None:
            wanted.add(key)
            waiting += plan.pieces[key].needs
    return {key: piece for key, piece in plan.pieces.items() if key in wanted}


def check_workers(client: Client, fitness: Fitness, largest_bytes: int, *, keep_going: bool, say: Say) -> None:
    """Refuse workers that cannot do the pieces, by name.

    Raises:
        UsageError: there is no worker, one does not fit and `keep_going` is not given, or none has enough RAM.
    """
    end = time.monotonic() + _JOIN_S
    while not (workers := _workers(client)) and time.monotonic() < end:
        time.sleep(_POLL_S)
    if not workers:
        raise UsageError(
            "--scheduler",
            got="a scheduler without workers",
            expected="one at least",
            fix="Start `dask worker ADDRESS`.",
        )
    found = within(
        _LOOK_AT_S, "workers", lambda: client.run(fitness.look, on_error="return"), fix="Stop those that hang."
    )
    wrong = {address: each for address, each in found.items() if isinstance(each, BaseException) or each}
    lines = [f"worker {address}: {_reasons(each)}" for address, each in wrong.items()]
    if lines and (not keep_going or len(wrong) == len(found)):
        raise UsageError(
            "workers",
            got="; ".join(lines),
            expected="workers with this command's programs, the checkpoint, and room for pieces",
            fix="Mend or stop them, or leave them out with --keep-going.",
        )
    for line in lines:
        say(f"{line}; it gets no work")
    rams = [each["resources"].get(RAM, each["memory_limit"] or largest_bytes) for each in workers.values()]
    if max(rams) < largest_bytes:
        raise UsageError(
            "RAM of workers",
            got=f"at most {max(rams) / 1e9:.2f} GB",
            expected=f"{largest_bytes / 1e9:.2f} GB for the largest piece",
            fix='Start a worker with more: dask worker ADDRESS --resources "RAM=BYTES", or use --splits.',
        )


def run_pieces(
    client: Client,
    pieces: dict[str, Piece],
    store: PieceStore,
    fitness: Fitness,
    progress: Progress,
    say: Say,
    *,
    keep_going: bool,
) -> dict[str, Failure]:
    """Do all pieces; those of lost workers are done again by others.

    Args:
        client: of the scheduler.
        pieces: by key, each after those that it needs.
        store: where they are kept.
        fitness: what workers need.
        progress: called for each kind of piece.
        say: called with what happens to workers.
        keep_going: go on when a piece fails.

    Returns:
        The pieces that failed, with `keep_going`.

    Raises:
        ServiceError: the scheduler or all workers vanished.
        EdgeKVError: a piece failed.
    """
    mark = f"edgekv-{hashed(repr(fitness))[:12]}"
    largest_bytes = max(piece.ram_bytes for piece in pieces.values())
    client.subscribe_topic(TOPIC, lambda event: say(f"worker {event[1]['worker']}: {_reasons(event[1]['obstacles'])}"))
    plugin = FitWorkers(fitness, mark, largest_bytes)
    within(_LOOK_AT_S, "workers", lambda: client.register_plugin(plugin), fix="Stop those that hang.")
    futures: dict[str, Future] = {}
    for key, piece in pieces.items():
        before = [futures[need] for need in piece.needs if need in futures]
        futures[key] = client.submit(
            do_piece, piece, store, before, key=f"{piece.kind}-{key}", resources={RAM: piece.ram_bytes, mark: 1}
        )
    names = {future.key: key for key, future in futures.items()}
    totals, done = Counter(piece.kind for piece in pieces.values()), Counter[str]()
    failed: dict[str, Failure] = {}
    waiting = {*futures.values()}
    watch = _Watch(client, mark, say)

    def least_bytes() -> int:
        """RAM of the smallest piece that could run now."""
        left = [pieces[names[each.key]] for each in waiting]
        return min(each.ram_bytes for each in left if not any(futures.get(need) in waiting for need in each.needs))

    try:
        while waiting:
            time.sleep(_POLL_S)
            watch.look(len(pieces) - len(waiting), len(pieces), least_bytes)
            for future in [each for each in waiting if each.done()]:
                waiting.discard(future)
                piece = pieces[names[future.key]]
                if future.status == "finished":
                    done[piece.kind] += 1
                    progress(piece.kind, done[piece.kind], totals[piece.kind])
                elif future.status == "error":
                    error = _as_named(piece, future.exception(timeout=_ANSWER_S))
                    if not keep_going:
                        raise error
                    failed[piece.key] = Failure(piece.kind, error)
                else:
                    raise watch.vanished(len(pieces) - len(waiting) - 1, len(pieces))
    finally:
        if waiting and client.status == "running":
            with suppress(Exception):  # the reason why it ends is raised
                within(_CANCEL_S, "scheduler", lambda: client.cancel([*waiting]), fix=_AGAIN)
    return failed


def do_piece(piece: Piece, store: PieceStore, before: Sequence[object]) -> float:
    """Do a piece in a worker; its files go to the store and the seconds that it took to the scheduler."""
    return store.make(piece.key, piece.kind, partial(piece.work, store=store)).seconds


class _Watch:
    """Says which workers come and go, and notices when nobody is left who could go on."""

    def __init__(self, client: Client, mark: str, say: Say) -> None:
        self._client = client
        self._mark = mark
        self._say = say
        self._workers: set[str] | None = None
        self._next = 0.0
        self._limit_s = vendor_timeout_s() + _PATIENCE_S
        self._moved = (-1, 0.0)
        self._idle_since: float | None = None

    def look(self, done: int, total: int, least_bytes: Callable[[], int]) -> None:
        """Look, once in a while.

        Args:
            done: number of finished pieces.
            total: number of pieces.
            least_bytes: RAM of the smallest piece that could run now.

        Raises:
            ServiceError: the scheduler or all fitting workers are gone, or no piece has ended for a long time.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_S
        if self._client.status not in ("running", "connecting"):
            raise self.vanished(done, total)
        found = _workers(self._client) if self._client.status == "running" else {}
        if self._workers is not None:
            for lost in sorted(self._workers - found.keys()):
                self._say(f"worker {lost} is lost; others do its pieces again")
            for come in sorted(found.keys() - self._workers):
                self._say(f"worker {come} joined")
        self._workers = {*found}
        self._expect_movement(done, total, now)
        ram_bytes = least_bytes()
        given = [each["resources"] for each in found.values()]
        is_fit = any(self._mark in each and each.get(RAM, 0) >= ram_bytes for each in given)
        if is_fit or any(each.get(looking(self._mark)) for each in given):
            self._idle_since = None
            return
        self._idle_since = self._idle_since or now
        if now - self._idle_since <= _PATIENCE_S:
            return
        if not found:
            raise self.vanished(done, total)
        raise ServiceError(
            "workers",
            got=f"none that fits for {_PATIENCE_S:g} s, after {done} of {total} pieces",
            expected=f"one with this command's programs and {ram_bytes / 1e9:.2f} GB of RAM",
            fix=_AGAIN,
        )

    def _expect_movement(self, done: int, total: int, now: float) -> None:
        if done != self._moved[0]:
            self._moved = (done, now)
        if now - self._moved[1] > self._limit_s:
            raise ServiceError(
                "pieces",
                got=f"none finished within {self._limit_s:g} s, after {done} of {total}",
                expected="one at least",
                fix=f"Look at the workers. {TIMEOUT_VARIABLE}={2 * vendor_timeout_s():g} allows more.",
            )

    def vanished(self, done: int, total: int) -> ServiceError:
        return ServiceError(
            "scheduler" if self._client.status != "running" else "workers",
            got=f"none any more, after {done} of {total} pieces",
            expected="a scheduler and a worker until the end",
            fix=_AGAIN,
        )


def _workers(client: Client) -> dict[str, Any]:
    """What the scheduler knows of its workers, by address.

    Raises:
        ServiceError: it does not answer.
    """
    found: dict[str, Any] = within(
        _ANSWER_S, "scheduler", lambda: client.scheduler_info(n_workers=_ALL).get("workers", {}), fix=_AGAIN
    )
    return found


def _as_named(piece: Piece, error: BaseException) -> BaseException:
    """The error of a piece; those of Dask become ones with a way out."""
    if isinstance(error, RuntimeError) and _UNREAD in str(error):
        return ServiceError(
            "scheduler",
            got="one that cannot read pieces",
            expected="one with this command's edgekv",
            fix="Start it in the same environment as the workers.",
        )
    if not isinstance(error, KilledWorker):
        return error
    return ServiceError(
        f"piece {piece.kind}-{piece.key}",
        got=f"{error.allowed_failures + 1} workers that died of it",
        expected="a worker that survives it",
        fix=f"They may have run out of RAM: it is estimated to need {piece.ram_bytes / 1e9:.2f} GB.",
    )


def _reasons(found: Any) -> str:
    return f"{type(found).__name__}: {found}" if isinstance(found, BaseException) else ", ".join(found)
