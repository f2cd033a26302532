"""The model that is served, and the jobs of requests on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from edgekv.model import Model
from edgekv.serve.channel import Channel
from edgekv.serve.errors import ApiError
from edgekv.serve.exchange import DisconnectedError, Exchange
from edgekv.serve.job import Work
from edgekv.serve.logprobs import TokenNames
from edgekv.serve.metrics import Metrics
from edgekv.serve.options import ServeOptions
from edgekv.serve.scheduler import Scheduler

T = TypeVar("T")
LONG_CHARACTERS = 16_384
"""Longer texts are tokenized in another thread, so that other requests need not wait."""


class Service:
    """What the paths of the API share.

    Attributes:
        model: only its tokenizer and templates may be used outside of the scheduler.
        name: its id.
        created: when the server started, in seconds since 1970.
        names: texts of single tokens.
        metrics: counters.
        scheduler: runs jobs.
        limits: what a client may use.
    """

    def __init__(self, model: Model, options: ServeOptions) -> None:
        self.model = model
        self.name = options.name or model.bundle.path.resolve().name
        self.created = int(time.time())
        self.names = TokenNames(model.tokenizer)
        self.metrics = Metrics()
        self.limits = options.limits
        self.scheduler = Scheduler(model, options.limits, self.metrics)

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together."""
        return self.model.bundle.manifest.context

    def check_name(self, name: str) -> None:
        """Refuse other models.

        Raises:
            ApiError: 404.
        """
        if name != self.name:
            message = f"model: got {name[:80]!r}; expected {self.name!r}. See GET /v1/models."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def tokenized(self, encode: Callable[[str], T], text: str) -> T:
        """The result of a function that tokenizes a text.

        Raises:
            EdgeKVError: as the function.
        """
        if len(text) <= LONG_CHARACTERS:
            return encode(text)
        return await asyncio.to_thread(encode, text)

    @asynccontextmanager
    async def job(self, exchange: Exchange, work: Work) -> AsyncIterator[Channel]:
        """The events of a job, which ends with the block or when the client goes.

        Raises:
            ApiError: the queue is full, or the server is stopping.
        """
        channel = Channel()
        job = self.scheduler.submit(work, channel)

        async def watch() -> None:
            await exchange.wait_until_gone()
            self.scheduler.cancel(job)

        watcher = asyncio.create_task(watch())
        try:
            yield channel
        except ApiError as error:
            if error.code == "cancelled":
                raise DisconnectedError from None
            raise
        finally:
            watcher.cancel()
            self.scheduler.cancel(job)
            with suppress(asyncio.CancelledError):
                await watcher
