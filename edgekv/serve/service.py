"""The model that is served."""

from __future__ import annotations

import time

from edgekv.bundle import lora_names, open_lora
from edgekv.engine import LoraChoice
from edgekv.errors import UsageError
from edgekv.model import Model
from edgekv.serve.engine_thread import EngineThread
from edgekv.serve.errors import ApiError
from edgekv.serve.logprobs import TokenNames
from edgekv.serve.metrics import Metrics
from edgekv.serve.options import ServeOptions
from edgekv.serve.work import WorkQueue


class Service:
    """What the paths of the API share.

    Attributes:
        model: only what does not change may be used outside of the engine's thread.
        texts: of the model.
        pictures: opens those of requests, and puts them into prompts.
        branch_rows: see `Engine`.
        name: its id.
        created: when the server started, in seconds since 1970.
        names: texts of single tokens.
        metrics: counters.
        engine: drives the engine.
        work: what requests need before that.
        limits: what a client may use.
        on_full: what happens to conversations that are longer than the context.
        speculation: how answers are drafted; None for no drafts.
    """

    def __init__(self, model: Model, options: ServeOptions) -> None:
        self.model = model
        self.texts = model.engine.texts
        self.pictures = model.engine.pictures
        self.branch_rows = model.engine.branch_rows
        self.name = options.name or model.bundle.path.resolve().name
        self.created = int(time.time())
        self.names = TokenNames(self.texts.tokenizer)
        self.metrics = Metrics(is_reproducible=model.is_reproducible)
        self.limits = options.limits
        self.on_full = options.on_full
        self.speculation = options.speculate
        self.work = WorkQueue(options.limits.queue)
        self.engine = EngineThread(model.engine, options.limits, self.metrics, batches=options.batches)

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together."""
        return self.model.bundle.manifest.context

    @property
    def context_length(self) -> int:
        """Tokens of the longest prompt. Those of the sink, which is put in front of it, are not among them."""
        sink = self.model.bundle.manifest.sink
        return self.context - (0 if sink is None else len(sink.tokens))

    def check_name(self, name: str | None) -> str | None:
        """The adapters that a name of a model asks for, behind a colon; None for the base model, which needs no name.

        Raises:
            ApiError: 404, another model, or adapters that the bundle does not have.
            AdapterError: one of them is damaged.
        """
        if name is None:
            return None
        base, colon, lora = name.partition(":")
        try:
            if name != self.name and (base != self.name or not colon):
                raise UsageError("model", got=repr(name[:80]), expected=repr(self.name), fix="See GET /v1/models")
            if name == self.name:
                return None
            for choice in LoraChoice.parse(lora, "model"):
                open_lora(self.model.bundle, choice.name)
            return lora
        except UsageError as error:
            raise ApiError(404, str(error), param="model", code="model_not_found") from None

    @property
    def has_chat(self) -> bool:
        """Whether the bundle has a chat template."""
        try:
            return bool(self.texts.chat_templates)
        except UsageError:
            return False

    @property
    def model_names(self) -> list[str]:
        """The names of all models: of the base, and of each adapter."""
        return [self.name, *(f"{self.name}:{name}" for name in lora_names(self.model.bundle))]
