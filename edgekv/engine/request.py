"""What a call asks of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from edgekv.bundle import Bundle
from edgekv.draft import Speculation
from edgekv.errors import UsageError
from edgekv.pictures import Picture
from edgekv.prefix import RetentionPolicy
from edgekv.spec import EmbeddingTask, RankingTask, Task
from edgekv.text.params import BeamParams, SamplingParams
from edgekv.text.sampler import LogitsProcessor
from edgekv.text.tools import Tools

DEFAULT_CACHE: Final = -1
"""The default one of the pool, which is emptied for each request, and in which all scores are computed."""

_SEEDS = 1 << 64

T = TypeVar("T")
G = TypeVar("G", EmbeddingTask, RankingTask)

_WRITER = "a bundle that writes text"
_EXPORT = "Export a checkpoint in the form of sentence-transformers."


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, what is wanted of it, and what it may use. Valid once the engine has added it.

    Attributes:
        tokens: the prompt, as `Texts.read` gives it.
        params: how to sample, or how to search with beams; None generates nothing.
        cache: pins the cache of a 64-bit id, or `DEFAULT_CACHE`; None lets the pool choose: the idle one that has most
            of the prompt, or a new one.
        salt: prefixes and pooled caches are shared only between equal salts.
        retention: how long the prefix cache keeps the blocks of this call.
        processors: change the logits before a token is chosen.
        tools: functions that the answer may call; the prompt declares them.
        speculation: how to draft tokens; None for no drafts.
        lora: adapters of the bundle, `NAME` or `NAME=SCALE`, several with commas between; None for the base model.
        reads_thoughts: whether the model's thoughts are apart from the text, if its chat template has marks for them.
        returns_logits: whether tokens carry the logits of their steps.
        scores: whether the logits after each token of the prompt are wanted, before any token.
        ends: whether those after its last token are wanted, and no token.
        branches: texts that each follow the tokens by itself, in one pass: the logits after each token of theirs are
            wanted.
        pictures: whose rows are among the tokens, so that they are there when they are run.
        bundle_defaults: names of the parameters that the bundle set, for the statistics.
    """

    tokens: tuple[int, ...]
    params: SamplingParams | BeamParams | None = None
    cache: int | None = None
    salt: str | None = None
    retention: RetentionPolicy | None = None
    processors: tuple[LogitsProcessor, ...] = ()
    tools: Tools | None = None
    speculation: Speculation | None = None
    lora: str | None = None
    reads_thoughts: bool = False
    returns_logits: bool = False
    scores: bool = False
    ends: bool = False
    branches: tuple[tuple[int, ...], ...] = ()
    pictures: tuple[Picture, ...] = ()
    bundle_defaults: tuple[str, ...] = ()

    @property
    def is_pooled(self) -> bool:
        """Whether it runs in a cache that it may share prefixes with, and not in the default one alone."""
        return self.params is not None or self.only_reads

    @property
    def only_reads(self) -> bool:
        """Whether it is a text, or several, for a model that writes none, in a cache of the pool."""
        return self.ends or bool(self.branches)

    @property
    def read_tokens(self) -> int:
        """Number of tokens that are given to the model."""
        return len(self.tokens) + sum(map(len, self.branches))

    def for_answer(self, number: int) -> Request:
        """That of one of several answers: with a seed, each has its own, from the given one up."""
        params = self.params
        if number == 0 or not isinstance(params, SamplingParams) or params.seed is None:
            return self
        return replace(self, params=replace(params, seed=(params.seed + number) % _SEEDS))

    def has_prompt_of(self, other: Request) -> bool:
        """Whether rows that are computed for one prompt are those of the other, and may be shared."""
        return (self.tokens, self.lora, self.salt) == (other.tokens, other.lora, other.salt)


def pieces(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Tokens, or others, in pieces of a size; the last may be shorter."""
    return [items[at : at + size] for at in range(0, len(items), size)]


def require_task(bundle: Bundle, kind: type[G]) -> G:
    """What a bundle of this kind gives.

    Raises:
        UsageError: it writes text, or gives something else.
    """
    task = bundle.manifest.task
    if isinstance(task, kind):
        return task
    kind_of_bundle, fix = (_WRITER, f"Use edgekv generate. {_EXPORT}") if task is None else (task.noun, task.use)
    raise UsageError(str(bundle.path), got=kind_of_bundle, expected=kind.noun, fix=fix)


def check_ends(bundle: Bundle) -> None:
    """Refuse a bundle that writes text.

    Raises:
        UsageError: it does.
    """
    if bundle.manifest.task is None:
        kinds = f"{EmbeddingTask.noun} or {RankingTask.noun}"
        raise UsageError(str(bundle.path), got=_WRITER, expected=kinds, fix=f"Use edgekv generate. {_EXPORT}")


def check_writes(bundle: Bundle) -> None:
    """Refuse a bundle that gives embeddings or scores.

    Raises:
        UsageError: it does.
    """
    task: Task | None = bundle.manifest.task
    if task is not None:
        raise UsageError(str(bundle.path), got=f"{task.noun}, which writes no text", expected=_WRITER, fix=task.use)
