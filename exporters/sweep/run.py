"""Carries the pieces of a sweep out on a Dask cluster."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed import Client, Future

from edgekv.errors import ServiceError, UsageError
from exporters.progress import Progress
from exporters.sweep.fitness import RAM, TOPIC, Fitness, FitWorkers
from exporters.sweep.piece import Piece, Plan
from exporters.sweep.store import PieceStore

_POLL_S = 0.1
_LOOK_S = 1.0
_PATIENCE_S = 60.0
_ALL = 1_000_000  # workers

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
    end = time.monotonic() + _PATIENCE_S / 6
    while not (workers := client.scheduler_info(n_workers=_ALL)["workers"]) and time.monotonic() < end:
        time.sleep(_POLL_S)
    if not workers:
        raise UsageError(
            "--scheduler",
            got="a scheduler without workers",
            expected="one at least",
            fix="Start `dask worker ADDRESS`.",
        )
    found = client.run(fitness.obstacles, on_error="return")
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
    mark = f"edgekv-{fitness.probe[:12]}"
    largest_bytes = max(piece.ram_bytes for piece in pieces.values())
    client.subscribe_topic(TOPIC, lambda event: say(f"worker {event[1]['worker']}: {_reasons(event[1]['obstacles'])}"))
    client.register_plugin(FitWorkers(fitness, mark, largest_bytes))
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
    watch = _Watch(client, say)
    try:
        while waiting:
            time.sleep(_POLL_S)
            watch.look(len(pieces) - len(waiting), len(pieces))
            for future in [each for each in waiting if each.done()]:
                waiting.discard(future)
                piece = pieces[names[future.key]]
                if future.status == "finished":
                    done[piece.kind] += 1
                    progress(piece.kind, done[piece.kind], totals[piece.kind])
                elif future.status == "error":
                    error = future.exception()
                    if not keep_going:
                        raise error
                    failed[piece.key] = Failure(piece.kind, error)
                else:
                    raise watch.vanished(len(pieces) - len(waiting) - 1, len(pieces))
    finally:
        for future in waiting:
            if client.status == "running":
                future.cancel()
    return failed


def do_piece(piece: Piece, store: PieceStore, before: Sequence[object]) -> float:
    """Do a piece in a worker; its files go to the store and the seconds that it took to the scheduler."""
    return store.make(piece.key, piece.kind, partial(piece.work, store=store)).seconds


class _Watch:
    """Says which workers come and go, and notices when nobody is left."""

    def __init__(self, client: Client, say: Say) -> None:
        self._client = client
        self._say = say
        self._workers: set[str] | None = None
        self._next = 0.0
        self._alone_since: float | None = None

    def look(self, done: int, total: int) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LOOK_S
        if self._client.status not in ("running", "connecting"):
            raise self.vanished(done, total)
        workers = set(self._client.nthreads()) if self._client.status == "running" else set()
        if self._workers is not None:
            for lost in sorted(self._workers - workers):
                self._say(f"worker {lost} is lost; others do its pieces again")
            for come in sorted(workers - self._workers):
                self._say(f"worker {come} joined")
        self._workers = workers
        self._alone_since = None if workers else self._alone_since or time.monotonic()
        if self._alone_since is not None and time.monotonic() - self._alone_since > _PATIENCE_S:
            raise self.vanished(done, total)

    def vanished(self, done: int, total: int) -> ServiceError:
        return ServiceError(
            "scheduler" if self._client.status != "running" else "workers",
            got=f"none any more, after {done} of {total} pieces",
            expected="a scheduler and a worker until the end",
            fix="Start them and run the same command again: finished pieces are not done again.",
        )


def _reasons(found: Any) -> str:
    return f"{type(found).__name__}: {found}" if isinstance(found, BaseException) else ", ".join(found)
