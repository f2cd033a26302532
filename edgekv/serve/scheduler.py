"""The engine's thread: requests take turns, a step each."""

from __future__ import annotations

import math
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from time import perf_counter

from edgekv.engine import Speculate
from edgekv.model import Model
from edgekv.serve.channel import Channel
from edgekv.serve.errors import CANCELLED, ApiError, api_error
from edgekv.serve.job import Job, Work
from edgekv.serve.metrics import Metrics
from edgekv.serve.options import Limits


class Scheduler:
    """Runs jobs on a model, in a thread of its own that alone uses the model.

    Every running job has one step in turn: a token, or a slice of its prompt. A job that has no session waits, first
    in, first out. Cancelled jobs and those past their deadline end before their next step.
    """

    def __init__(
        self,
        model: Model,
        limits: Limits,
        metrics: Metrics,
        speculate: Speculate | None = None,
        *,
        batches: bool = False,
    ) -> None:
        """Start the thread.

        Args:
            model: an open model; other threads must not use it until `close`.
            limits: of sessions, queue and time.
            metrics: what is counted.
            speculate: how answers are drafted; None for no drafts.
            batches: whether a pass advances all jobs that have room in it.
        """
        self._model = model
        self._limits = limits
        self._metrics = metrics
        self._speculate = speculate
        self._batches = batches
        self._alone_tokens = model.cache.ar[-1]
        self._beside_tokens = max(graph.ar for graph in model.bundle.manifest.graphs)
        self._pool = model.sequences
        self._changed = threading.Condition()
        self._arrived: deque[Job] = deque()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._is_closed = False
        self._mean_s = 1.0
        self._thread = threading.Thread(target=self._loop, name="edgekv-engine", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Jobs that wait for a session."""
        return len(self._arrived) + len(self._waiting)

    @property
    def running(self) -> int:
        """Jobs that take turns."""
        return len(self._running)

    def submit(self, works: Sequence[Work], channel: Channel) -> list[Job]:
        """Queue the jobs of a request, all or none, from any thread.

        Raises:
            ApiError: 429, the queue has no room for them; 503, the server is stopping.
        """
        jobs: list[Job] = []
        for index, work in enumerate(works):
            leader = next((job for job in jobs if job.work.shares_prompt(work)), None)
            jobs.append(Job(work, channel, self._limits.request_s, index, leader))
        with self._changed:
            if self._is_closed:
                raise _stopping()
            # Those that can start at once are not in the queue yet when a burst arrives.
            free = max(0, self._limits.sessions - self.running)
            waiting = max(0, self.queued - free)
            starting = max(0, free - self.queued)
            if waiting + len(jobs) - starting > self._limits.queue:
                after_s = min(60, max(1, math.ceil(self._mean_s * waiting / self._limits.sessions)))
                found = "is full" if len(jobs) == 1 else f"has no room for {len(jobs)} answers"
                message = f"The queue {found} ({waiting} waiting). Try again in {after_s} s."
                raise ApiError(429, message, code="queue_full", retry_after_s=after_s)
            self._arrived.extend(jobs)
            self._changed.notify()
        return jobs

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End jobs before their next step, from any thread."""
        for job in jobs:
            job.is_cancelled = True
        with self._changed:
            self._changed.notify()

    def stop(self) -> None:
        """End all jobs and the thread after its current step, from any thread; the model stays open."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether the thread has ended, or does so soon."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """End the jobs of a thread that does not end, from another thread."""
        for job in (*self._running, *self._waiting, *self._arrived):
            job.tell(_stopping())

    def _loop(self) -> None:
        try:
            self._take_turns()
        finally:  # also after a bug, so that nobody waits for an engine that stands still
            with self._changed:
                self._is_closed = True
                self._waiting.extend(self._arrived)
                self._arrived.clear()
            for job in (*self._running, *self._waiting):
                self._end(job, _stopping())
            self._waiting.clear()
            self._pool.forget_idle()
            self._measure()

    def _take_turns(self) -> None:
        while True:
            with self._changed:
                while not (self._arrived or self._waiting or self._running or self._is_closed):
                    self._changed.wait()
                self._waiting.extend(self._arrived)
                self._arrived.clear()
                if self._is_closed:
                    return
            self._admit()
            if self._batches:
                self._advance_together()
            for job in tuple(self._running):
                self._step(job)

    def _admit(self) -> None:
        """Start the jobs that have a session, in the order of their arrival."""
        skipped: deque[Job] = deque()
        while self._waiting:
            job = self._waiting.popleft()
            if (over := self._over(job)) is not None:
                self._end(job, over)
            elif job.waits_for_leader:
                skipped.append(job)
            elif job.scores and any(each.scores for each in self._running):
                skipped.append(job)  # the model has one session for scoring
            elif not self._start(job):
                skipped.append(job)
                break
        self._waiting.extendleft(reversed(skipped))

    def _start(self, job: Job) -> bool:
        sequence = None
        if job.work.params is not None:
            owner = job.work.salt, job.work.lora
            sequence = self._pool.take(job.work.prompt, owner, self._limits.sessions)
            if sequence is None:
                return False
        try:
            job.start(self._model, sequence, self._speculate)
        except BaseException as error:  # panics of Rust libraries are no Exception; this thread gets no signals
            job.sequence = sequence
            self._end(job, api_error(error))
        else:
            self._running.append(job)
            self._measure()
        return True

    def _advance_together(self) -> None:
        """Run the next pass of all answers as one; their steps then only take its tokens."""
        jobs = [job for job in self._running if job.answer is not None and self._over(job) is None]
        try:
            self._model.advance_together([job.answer for job in jobs if job.answer is not None])
        except BaseException as error:
            for job in jobs:
                self._end(job, api_error(error))

    def _step(self, job: Job) -> None:
        if (over := self._over(job)) is not None:
            self._end(job, over)
            return
        try:
            # Beside other answers a prompt is read in pieces as short as the bundle's graphs.
            finished = job.step(self._alone_tokens if len(self._running) == 1 else self._beside_tokens)
        except BaseException as error:
            self._end(job, api_error(error))
            return
        self._metrics.count_tokens(job)
        if finished is None:
            return
        self._metrics.count_finished(job)
        spent = perf_counter() - job.arrived
        self._mean_s += 0.1 * (spent - self._mean_s)
        self._free(job)
        job.tell(finished)

    def _over(self, job: Job) -> ApiError | None:
        """Why a job must end before its next step."""
        if job.is_cancelled:
            return ApiError(499, "the client has gone.", code=CANCELLED)
        if perf_counter() > job.deadline:
            limit = f"{self._limits.request_s:g} s"
            message = f"request: got {limit} without an end; expected less. Ask for fewer tokens."
            return ApiError(504, message, code="timeout")
        return None

    def _end(self, job: Job, error: ApiError) -> None:
        self._metrics.count_failed(job, error)
        self._free(job)
        job.tell(error)

    def _free(self, job: Job) -> None:
        if job in self._running:
            self._running.remove(job)
        try:
            job.close()
        except Exception:  # such as a full disk of the prefix cache: the answer itself is right
            traceback.print_exc()
        if job.sequence is not None:
            self._pool.give_back(job.sequence)
        self._measure()

    def _measure(self) -> None:
        """Note what the cache holds: other threads must not look at the model."""
        self._metrics.note(self.queued, self.running, self._pool.taken, self._model)


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping.", code="stopping")
