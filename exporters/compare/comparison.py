"""Two models on one text: how far apart their predictions are, and what each costs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np

from edgekv.bundle import QualityRecord
from edgekv.errors import UsageError
from edgekv.spec.text import encode
from exporters.compare.contender import Contender, ContenderDescription, TimedContender, Timing
from exporters.compare.plan import ComparePlan
from exporters.inspect.held_out import MEASURED_TOKENS, HeldOutChat, measure_chat
from exporters.inspect.tally import Tally
from exporters.inspect.wikitext import Window, measured_windows
from exporters.progress import Progress, silent
from exporters.quantize.calibrate import cut_windows
from exporters.quantize.reference import Floats

_WARM_UP = 1  # turns that are not counted
_MAX_PADDING = 1024  # tokens; graphs pad the vocabulary to multiples of 64 to 512
_SMALL_VOCABULARY = 1000  # random tokens for a model whose vocabulary is unknown
_ONE_VOCABULARY = "Compare models with one vocabulary, such as exports of one checkpoint."


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two models.

    Attributes:
        model: what it is.
        perplexity: exp of the mean negative log-likelihood of the text's tokens.
        prefill_tokens_per_s: of a prompt of random tokens, the median over turns; None if it was not timed.
        decode_tokens_per_s: the same for the tokens generated after it.
    """

    model: ContenderDescription
    perplexity: float
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Model B against model A, over all predicted tokens.

    Attributes:
        text: name of the text.
        tokens: number of tokens predicted.
        window: most tokens of a window.
        a: the first model.
        b: the second model.
        perplexity_ratio: that of B over that of A.
        perplexity_ratio_error: its standard error, from the spread of the tokens' log-likelihood differences.
        kl_nats: mean Kullback-Leibler divergence of A's next-token distribution from B's, nats.
        kl_99_nats: 99 % of the tokens have at most this divergence, nats.
        kl_max_nats: the largest divergence of a token, nats.
        top1_agreement: share of positions with the same most likely token.
        chat: on a conversation in a chat template that one of them has, and on the tokens of the template alone.
    """

    text: str
    tokens: int
    window: int
    a: Side
    b: Side
    perplexity_ratio: float
    perplexity_ratio_error: float
    kl_nats: float
    kl_99_nats: float
    kl_max_nats: float
    top1_agreement: float
    chat: tuple[QualityRecord, ...] = ()


def compare(
    a: Contender, b: Contender, text: str, text_name: str, plan: ComparePlan, progress: Progress = silent
) -> Comparison:
    """Run the text through both models, window by window, then time both in turns.

    Raises:
        UsageError: the models have other vocabularies or other first tokens, neither has a tokenizer, the text is too
            short, or the timed tokens do not fit a context.
        EngineError: a runtime failed.
    """
    _check_room(a, b, plan)
    windows = text_windows(a, b, text, plan)
    tally = Tally()
    inputs = [window.inputs for window in windows]
    for done, (window, ours, theirs) in enumerate(zip(windows, a.logits(inputs), b.logits(inputs), strict=True)):
        progress("compare", done, len(windows))
        tally.add(window, *_same_width(ours, theirs, b.described.path))
    progress("compare", len(windows), len(windows))
    result = tally.evaluation(b.described.engine, text_name)
    chat = _chat(a, b, plan)
    speeds = _speeds([a, b], plan, progress)
    sides = [
        Side(model=contender.described, perplexity=perplexity, prefill_tokens_per_s=prefill, decode_tokens_per_s=decode)
        for contender, perplexity, (prefill, decode) in zip(
            (a, b), (result.reference_perplexity, result.perplexity), speeds, strict=True
        )
    ]
    return Comparison(
        text=text_name,
        tokens=result.tokens,
        window=max(len(window.inputs) for window in windows),
        a=sides[0],
        b=sides[1],
        perplexity_ratio=result.perplexity_ratio,
        perplexity_ratio_error=result.perplexity_ratio_error,
        kl_nats=result.kl_nats,
        kl_99_nats=result.kl_99_nats,
        kl_max_nats=result.kl_max_nats,
        top1_agreement=result.top1_agreement,
        chat=chat,
    )


def text_windows(a: Contender, b: Contender, text: str, plan: ComparePlan) -> list[Window]:
    """The text as windows of tokens that both models read.

    Raises:
        UsageError: as `compare`.
    """
    tokenizers = [contender.tokenizer for contender in (a, b) if contender.tokenizer is not None]
    encoded = [encode(tokenizer, text, field="text", add_special_tokens=False) for tokenizer in tokenizers]
    if not encoded:
        raise UsageError(
            "tokenizer.json",
            got="none in either folder",
            expected="one in one of the two",
            fix="Copy the checkpoint's tokenizer.json into a folder.",
        )
    first = _first(a, b)
    most = plan.tokens + max(1, len(first))
    ids = encoded[0][:most]
    if any(other[:most] != ids for other in encoded[1:]):
        at = next(i for i, pair in enumerate(zip(*encoded, strict=False)) if pair[0] != pair[1])
        raise UsageError(
            b.described.path,
            got=f"another token at place {at} of the text: {encoded[1][at]}",
            expected=f"{encoded[0][at]}, as {a.described.path} has it",
            fix=_ONE_VOCABULARY,
        )
    length = _length(a, b, plan)
    field = "--window" if length == plan.window else "context"
    return measured_windows(cut_windows(ids, length, first, field), first, plan.tokens)


def _chat(a: Contender, b: Contender, plan: ComparePlan) -> tuple[QualityRecord, ...]:
    """On a conversation; nothing if neither has a chat template, or its tokens are unknown."""
    chatting = next(
        (contender for contender in (a, b) if contender.chat is not None and contender.tokenizer is not None), None
    )
    if chatting is None or chatting.tokenizer is None:
        return ()
    chat = HeldOutChat.of(chatting.tokenizer, chatting.chat)
    if chat is None:
        return ()
    windows = chat.windows(_length(a, b, plan), _first(a, b), min(plan.tokens, MEASURED_TOKENS["chat"]))
    inputs = [window.window.inputs for window in windows]
    logits = zip(a.logits(inputs), b.logits(inputs), strict=True)
    return measure_chat(windows, (_same_width(*logit, b.described.path) for logit in logits))


def _length(a: Contender, b: Contender, plan: ComparePlan) -> int:
    """Most tokens of a window."""
    return min(plan.window, a.described.context, b.described.context)


def _first(a: Contender, b: Contender) -> Sequence[int]:
    """The tokens that every window begins with."""
    needed = [contender for contender in (a, b) if contender.must_begin]
    if len(needed) == 2 and list(a.first) != list(b.first):
        raise UsageError(
            b.described.path,
            got=f"a bundle whose texts begin with the tokens {list(b.first)}",
            expected=f"{list(a.first)}, as those of {a.described.path}",
            fix="Export both with the same --sink.",
        )
    return (needed or [a])[0].first


def _same_width(ours: Floats, theirs: Floats, path: str) -> tuple[Floats, Floats]:
    """Logits of the tokens that both have: some runtimes pad the vocabulary."""
    width = min(ours.shape[-1], theirs.shape[-1])
    if abs(ours.shape[-1] - theirs.shape[-1]) > _MAX_PADDING:
        raise UsageError(
            path,
            got=f"{theirs.shape[-1]} tokens in the vocabulary",
            expected=f"{ours.shape[-1]}, as the other model has",
            fix=_ONE_VOCABULARY,
        )
    return ours[:, :width], theirs[:, :width]


def _check_room(a: Contender, b: Contender, plan: ComparePlan) -> None:
    if not plan.new_tokens:
        return
    for contender in (a, b):
        described = contender.described
        if isinstance(contender, TimedContender) and plan.prompt_tokens + plan.new_tokens + 1 > described.context:
            raise UsageError(
                "--prompt-tokens and --new-tokens",
                got=f"{plan.prompt_tokens} and {plan.new_tokens} tokens",
                expected=f"at most {described.context - 1} together, the context of {described.path}",
                fix="Use smaller ones.",
            )


def _speeds(
    contenders: Sequence[Contender], plan: ComparePlan, progress: Progress
) -> list[tuple[float | None, float | None]]:
    """Tokens per second in prefill and in decode, of each model that is timed. No prompt comes twice."""
    timed = [contender for contender in contenders if plan.new_tokens and isinstance(contender, TimedContender)]
    random = np.random.default_rng(plan.seed)
    timings: dict[int, list[Timing]] = {id(contender): [] for contender in timed}
    turns = plan.turns + _WARM_UP if timed else 0
    for turn in range(turns):
        progress("time", turn, turns)
        for contender in timed:
            timing = contender.time(_prompt(contender, plan, random), 1 + plan.new_tokens)
            if turn >= _WARM_UP:
                timings[id(contender)].append(timing)
    if turns:
        progress("time", turns, turns)
    return [
        _speed(timings[id(contender)], plan) if id(contender) in timings else (None, None) for contender in contenders
    ]


def _speed(timings: Sequence[Timing], plan: ComparePlan) -> tuple[float, float]:
    first_s, rest_s = median(timing.first_s for timing in timings), median(timing.rest_s for timing in timings)
    return plan.prompt_tokens / first_s, plan.new_tokens / rest_s


def _prompt(contender: Contender, plan: ComparePlan, random: np.random.Generator) -> list[int]:
    """Random tokens, after those that a text must begin with."""
    tokenizer = contender.tokenizer
    vocab = tokenizer.get_vocab_size(with_added_tokens=False) if tokenizer is not None else _SMALL_VOCABULARY
    drawn: list[int] = random.integers(vocab, size=plan.prompt_tokens).tolist()
    first = list(contender.first) if contender.must_begin else []
    return [*first, *drawn[len(first) :]]
