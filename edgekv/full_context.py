"""A conversation that is longer than the context: its oldest turns are dropped, or it is refused."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from edgekv.errors import ContextFullError
from edgekv.load_options import OnFull
from edgekv.model import Model
from edgekv.spec.chat import Message

_PARTS = 4
"""An answer has room for a quarter of the context, and turns are dropped in steps of a quarter."""


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """The prompt of a conversation that fits into the context.

    Attributes:
        text: as the chat template renders it.
        tokens: its ids, as `Model.read` gives them.
        dropped_turns: the oldest turns of the conversation, which it does not have.
        dropped_messages: the messages of these turns.
        messages: what it has.
    """

    text: str
    tokens: list[int]
    dropped_turns: int = 0
    dropped_messages: int = 0
    messages: tuple[Message, ...] = ()


def split_turns(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """The system messages at the front, and the turns: each begins with a message of the user, except for the first."""
    first = next((at for at, each in enumerate(messages) if each.get("role") not in ("system", "developer")), None)
    if first is None:
        return [*messages], []
    turns = [[messages[first]]]
    for each in messages[first + 1 :]:
        if each.get("role") == "user":
            turns.append([])
        turns[-1].append(each)
    return [*messages[:first]], turns


def fit_prompt(
    model: Model,
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], str],
    *,
    on_full: OnFull = "drop-oldest",
    wanted_tokens: int | None = None,
    tokenize: Callable[[str], list[int]] | None = None,
) -> FittedPrompt:
    """The prompt of a conversation.

    Where it leaves less than a quarter of the context for the answer, or less than `wanted_tokens` if that is fewer,
    the oldest turns are dropped. System messages and the newest turn stay. Turns are dropped in steps of a quarter of
    the context, counted from the first one, so that the next prompts begin alike and find that in the cache.

    Args:
        model: its tokenizer and context are used.
        messages: the conversation.
        render: the text of messages.
        on_full: whether turns are dropped.
        wanted_tokens: the most tokens that the answer may have; None for as many as there is room for.
        tokenize: the tokens of a text; None for `model.encode_chat`.

    Raises:
        ContextFullError: it is longer than the context, with all turns (`stop`) or with the newest alone.
        EdgeKVError: as `render`, or the tokenizer fails.
    """
    system, turns = split_turns(messages)
    last = len(turns) - 1
    context: int = model.bundle.manifest.context
    step = max(1, context // _PARTS)
    room = step if wanted_tokens is None else min(step, wanted_tokens)

    def prompt(first: int) -> FittedPrompt:
        kept = [*system, *(each for turn in turns[first:] for each in turn)]
        text = render(kept)
        tokens = model.read((tokenize or model.encode_chat)(text), "messages")
        return FittedPrompt(text, tokens, first, len(messages) - len(kept), tuple(kept))

    @cache
    def fitting(first: int) -> FittedPrompt | None:
        try:
            found = prompt(first)
        except ContextFullError:
            return None
        return found if len(found.tokens) + room <= context + 1 else None

    if on_full == "stop" or last < 1 or model.evicts_tokens:
        return prompt(0)
    if (whole := fitting(0)) is not None:
        return whole
    # In tokens; those of the template are left out, as only the step that a turn begins in matters.
    offsets = [0, *accumulate(sum(_tokens(model, each) for each in turn) for turn in turns[:-1])]
    firsts = sorted({bisect_left(offsets, at) for at in range(step, offsets[-1] + 1, step)} | {last})
    at = bisect_left(firsts, True, key=lambda first: fitting(first) is not None)
    return (fitting(firsts[at]) if at < len(firsts) else None) or prompt(last)


def _tokens(model: Model, message: Message) -> int:
    """About how many tokens a message has; of one that is too long to be tokenized, those of the whole context."""
    values = (each if isinstance(each, str) else json.dumps(each, default=str) for each in message.values())
    try:
        return len(model.encode_chat(" ".join(values)))
    except ContextFullError:
        return int(model.bundle.manifest.context)
