"""Does pieces on a Dask cluster; those of lost workers are done again by others."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import zip_longest
from queue import SimpleQueue
from typing import Any
from uuid import uuid4

from distributed import Client, Future, KilledWorker, as_completed, get_worker

from edgekv.errors import ServiceError, UsageError
from edgekv.machine.child import TIMEOUT_VARIABLE, vendor_timeout_s
from edgekv.machine.system import return_freed_memory
from exporters.options import Cluster
from exporters.pipeline.chains import find_chains
from exporters.pipeline.dask.cluster import connected
from exporters.pipeline.dask.fitness import RAM, TOPIC, FitWorkers, WorkerRequirements, looking, versions
from exporters.pipeline.dask.limit import within
from exporters.pipeline.hashed import hashed
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.piece import Piece, Plan, PlannedPiece
from exporters.pipeline.place import Identity, Place
from exporters.pipeline.store import PieceStore
from exporters.progress import Progress, silent

_POLL_S = 0.1
_LOOK_S = 1.0
_JOIN_S = 30.0  # of the first worker
_PATIENCE_S = 60.0
_ANSWER_S = 60.0  # of a scheduler
_LOOK_AT_S = 1800.0  # of workers: each may fetch the checkpoint first
_CANCEL_S = 10.0
_ALL = 1_000_000  # workers
_RETRIES = 2  # of pieces that travel by URL: object stores refuse a request now and then
_UNREAD = "deserialization of the task graph"  # in Dask's message
_AGAIN = "Start them and run the same command again: finished pieces are not done again."

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """A piece that failed, and why."""

    kind: str
    error: BaseException


def run_on(
    cluster: Cluster,
    plan: Plan,
    targets: Sequence[str],
    store: PieceStore,
    place: Place | None,
    identity: Identity | None,
    progress: Progress = silent,
    *,
    disk_bytes: int,
) -> dict[str, Failure]:
    """Do all that these targets need and that is not finished.

    Args:
        cluster: where.
        plan: the pieces.
        targets: names of the last ones.
        store: of the pieces, which all workers reach.
        place: of the checkpoint, where all workers find it; None if no piece reads one.
        identity: what lies there.
        progress: called for each kind of piece.
        disk_bytes: free space wanted where workers keep pieces.

    Returns:
        The pieces that failed, with `keep_going`.

    Raises:
        UsageError: workers do not fit.
        ServiceError: the scheduler cannot be reached, or vanished.
        EdgeKVError: a piece failed, without `keep_going`.
    """
    for name, write in plan.sources.items():
        store.make(name, "given", write)
    unfinished = plan.unfinished(store, targets)
    if not unfinished:
        return {}
    probe = hashed("probe", uuid4().hex)  # of this command, which removes it
    store.make(probe, "probe", lambda folder: None)
    requirements = WorkerRequirements(versions(), place, identity, store, probe, disk_bytes)
    largest_bytes = max(planned.ram_bytes for planned in unfinished.values())
    try:
        with connected(cluster.scheduler, cluster.workers, largest_bytes) as client:
            cluster.say(
                f"{len(unfinished)} of {len(plan.ancestors(targets))} pieces to do; dashboard: {client.dashboard_link}"
            )
            check_workers(client, requirements, largest_bytes, keep_going=cluster.keep_going, say=cluster.say)
            every, keep_going = plan.residual_every, cluster.keep_going
            return run_pieces(
                client, unfinished, requirements, progress, cluster.say, keep_going=keep_going, residual_every=every
            )
    finally:
        store.remove([probe])


def check_workers(
    client: Client, requirements: WorkerRequirements, largest_bytes: int, *, keep_going: bool, say: Say
) -> None:
    """Refuse workers that cannot do the pieces, by name.

    Raises:
        UsageError: there is no worker, one does not fit and `keep_going` is not given, or none has enough RAM.
    """
    try:
        within(2 * _JOIN_S, "scheduler", lambda: client.wait_for_workers(1, timeout=_JOIN_S), fix=_AGAIN)
    except TimeoutError:
        raise UsageError(
            "--scheduler",
            got="a scheduler without workers",
            expected="one at least",
            fix="Start `dask worker ADDRESS`.",
        ) from None
    for line in within(_ANSWER_S, "scheduler", partial(_other_versions, client), fix=_AGAIN):
        say(line)
    problems = within(
        _LOOK_AT_S, "workers", lambda: client.run(requirements.look, on_error="return"), fix="Stop those that hang."
    )
    wrong = {address: problem for address, problem in problems.items() if isinstance(problem, BaseException) or problem}
    lines = [f"worker {address}: {_reasons(problem)}" for address, problem in wrong.items()]
    if lines and (not keep_going or len(wrong) == len(problems)):
        raise UsageError(
            "workers",
            got="; ".join(lines),
            expected="workers with this command's programs, the checkpoint, and room for pieces",
            fix="Correct or stop them, or leave them out with --keep-going.",
        )
    for line in lines:
        say(f"{line}; it gets no work")
    rams = [info["resources"].get(RAM, info["memory_limit"] or largest_bytes) for info in _workers(client).values()]
    if max(rams, default=0) < largest_bytes:
        raise UsageError(
            "RAM of workers",
            got=f"at most {max(rams, default=0) / 1e9:.2f} GB",
            expected=f"{largest_bytes / 1e9:.2f} GB for the largest piece",
            fix='Start a worker with more: dask worker ADDRESS --resources "RAM=BYTES", or use --splits.',
        )


def _other_versions(client: Client) -> list[str]:
    """What Dask says of other versions of Python and of its own packages."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client.get_versions(check=True)
    return [str(warning.message) for warning in caught if "versions" in str(warning.message)]


def run_pieces(
    client: Client,
    unfinished: Mapping[str, PlannedPiece],
    requirements: WorkerRequirements,
    progress: Progress,
    say: Say,
    *,
    keep_going: bool,
    residual_every: int,
) -> dict[str, Failure]:
    """Do all pieces; those of lost workers are done again by others.

    Args:
        client: of the scheduler.
        unfinished: by name, each after those that it needs.
        requirements: what workers need.
        progress: called for each kind of piece.
        say: called with what happens to workers.
        keep_going: go on when a piece fails.
        residual_every: see `Inputs`.

    Returns:
        The pieces that failed, with `keep_going`.

    Raises:
        ServiceError: the scheduler or all workers vanished.
        EdgeKVError: a piece failed.
    """
    mark = f"edgekv-{hashed(repr(requirements))[:12]}"
    largest_bytes = max(planned.ram_bytes for planned in unfinished.values())
    client.subscribe_topic(TOPIC, lambda event: say(f"worker {event[1]['worker']}: {_reasons(event[1]['problems'])}"))
    plugin = FitWorkers(requirements, mark, largest_bytes)
    within(_LOOK_AT_S, "workers", lambda: client.register_plugin(plugin), fix="Stop those that hang.")
    told: SimpleQueue[str] = SimpleQueue()
    done_topic = f"{mark}-done"
    client.subscribe_topic(done_topic, lambda event: told.put(event[1]))
    chains = {chain[-1]: chain for chain in find_chains({name: planned.piece for name, planned in unfinished.items()})}
    chain_of = {name: last for last, chain in chains.items() for name in chain}
    futures: dict[str, Future] = {}
    for last, chain in chains.items():
        before = {chain_of[need] for name in chain for need in unfinished[name].piece.needs if need in unfinished} - {
            last
        }
        futures[last] = client.submit(
            do_chain,
            [unfinished[name].piece for name in chain],
            requirements.store,
            requirements.place,
            done_topic,
            residual_every,
            [futures[needed] for needed in before],
            key=f"{unfinished[last].piece.kind}-{last}",
            resources={RAM: max(unfinished[name].ram_bytes for name in chain), mark: 1},
            retries=_RETRIES if requirements.store.is_remote else 0,
            priority=len(chain),  # the longest first: short ones fill the end
        )
    lasts = {future.key: last for last, future in futures.items()}
    totals, done = Counter(planned.piece.kind for planned in unfinished.values()), Counter[str]()
    failed: dict[str, Failure] = {}
    left, ended = {*unfinished}, as_completed(futures.values(), loop=client.loop)
    watch = _Watch(client, mark, say)

    def min_bytes() -> int:
        """RAM of the smallest piece that could run now."""
        ready = [unfinished[name] for name in left if left.isdisjoint(unfinished[name].piece.needs)]
        return min((planned.ram_bytes for planned in ready), default=0)

    def finished(names: Iterable[str]) -> None:
        for name in names:
            if name in left:
                left.discard(name)
                kind = unfinished[name].piece.kind
                done[kind] += 1
                progress(kind, done[kind], totals[kind])

    try:
        while not ended.is_empty():
            time.sleep(_POLL_S)
            watch.look(len(unfinished) - len(left), len(unfinished), min_bytes)
            while not told.empty():
                finished([told.get()])
            for future in ended.next_batch(block=False):
                chain = chains[lasts[future.key]]
                if future.status == "finished":
                    finished(chain)
                elif future.status == "error":
                    failure = future.exception(timeout=_ANSWER_S)
                    guilty = chains[lasts[failure.task]] if isinstance(failure, KilledWorker) else chain
                    cause, error = _named(unfinished, guilty, requirements.store, failure)
                    if not keep_going:
                        raise error
                    failed |= dict.fromkeys(left.intersection(chain), Failure(unfinished[cause].piece.kind, error))
                    left.difference_update(chain)
                else:
                    raise watch.vanished(len(unfinished) - len(left), len(unfinished))
    finally:
        if not ended.is_empty() and client.status == "running":
            with suppress(Exception):  # the reason why it ends is raised
                within(_CANCEL_S, "scheduler", lambda: client.cancel([*futures.values()]), fix=_AGAIN)
    return failed


class PieceError(Exception):
    """A piece of a chain failed.

    Attributes:
        name: of the piece.
        error: why.
    """

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(name, error)
        self.name = name
        self.error = error


def do_chain(
    pieces: Sequence[Piece],
    store: PieceStore,
    place: Place | None,
    topic: str,
    residual_every: int,
    before: Sequence[object],
) -> None:
    """Do pieces one after another in a worker; their files go to the store, their names to the topic.

    Raises:
        PieceError: one failed.
    """
    inputs = _inputs(store, place)
    inputs.residual_every = residual_every
    for piece in reversed(pieces):  # a lost worker may have left out the residual that the next piece reads
        if store.find(piece.name) is None and (left_out := piece.unusable(store)) is not None:
            store.remove([left_out])
    for piece, following in zip_longest(pieces, pieces[1:]):
        inputs.goes_on = following is not None and piece.name in following.needs
        if piece.kind not in ("layer", "head"):
            inputs.release()
        try:
            store.make(piece.name, piece.kind, partial(piece.make, inputs=inputs))
        except Exception as error:
            raise PieceError(piece.name, error) from None
        return_freed_memory()
        get_worker().log_event(topic, piece.name)


@cache
def _inputs(store: PieceStore, place: Place | None) -> Inputs:
    """Those of this process, so that a checkpoint is opened and hashed once."""
    return Inputs(store, place, keeps_residual=get_worker().state.nthreads == 1, threads=1)


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

    def look(self, done: int, total: int, min_bytes: Callable[[], int]) -> None:
        """Look, once in a while.

        Args:
            done: number of finished pieces.
            total: number of pieces.
            min_bytes: RAM of the smallest piece that could run now.

        Raises:
            ServiceError: the scheduler or all fitting workers are gone, or no piece has ended for a long time.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_S
        if self._client.status not in ("running", "connecting"):
            raise self.vanished(done, total)
        workers = _workers(self._client) if self._client.status == "running" else {}
        if self._workers is not None:
            for lost in sorted(self._workers - workers.keys()):
                self._say(f"worker {lost} is lost; others do its pieces again")
            for come in sorted(workers.keys() - self._workers):
                self._say(f"worker {come} joined")
        self._workers = {*workers}
        self._expect_movement(done, total, now)
        ram_bytes = min_bytes()
        resources_of_workers = [info["resources"] for info in workers.values()]
        is_fit = any(
            self._mark in resources and resources.get(RAM, 0) >= ram_bytes for resources in resources_of_workers
        )
        if is_fit or any(resources.get(looking(self._mark)) for resources in resources_of_workers):
            self._idle_since = None
            return
        self._idle_since = self._idle_since or now
        if now - self._idle_since <= _PATIENCE_S:
            return
        if not workers:
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
    workers: dict[str, Any] = within(
        _ANSWER_S, "scheduler", lambda: client.scheduler_info(n_workers=_ALL).get("workers", {}), fix=_AGAIN
    )
    return workers


def _named(
    unfinished: Mapping[str, PlannedPiece], chain: Sequence[str], store: PieceStore, error: BaseException
) -> tuple[str, BaseException]:
    """The piece that failed, and its error; errors of Dask become ones that name the fix."""
    if isinstance(error, PieceError):
        return error.name, error.error
    name = next((link for link in chain if store.find(link) is None), chain[-1])
    if isinstance(error, RuntimeError) and _UNREAD in str(error):
        return name, ServiceError(
            "scheduler",
            got="one that cannot read pieces",
            expected="one with this command's edgekv",
            fix="Start it in the same environment as the workers.",
        )
    if not isinstance(error, KilledWorker):
        return name, error
    planned = unfinished[name]
    return name, ServiceError(
        f"piece {planned.piece.kind}-{name}",
        got=f"{error.allowed_failures + 1} workers that died of it",
        expected="a worker that survives it",
        fix=f"They may have run out of RAM: it is estimated to need {planned.ram_bytes / 1e9:.2f} GB.",
    )


def _reasons(problem: Any) -> str:
    return f"{type(problem).__name__}: {problem}" if isinstance(problem, BaseException) else ", ".join(problem)
