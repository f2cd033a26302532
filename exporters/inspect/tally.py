"""Metrics of a bundle's logits against the reference's, accumulated token by token."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import QualityRecord
from exporters.inspect.wikitext import Pages, Window, WordPerplexity
from exporters.quantize.reference import Floats

_TINY = 1e-30
_MOST_NATS = 700.0
_ROWS = 64  # tokens at a time: probabilities are float64


class ModeAgreement(msgspec.Struct, frozen=True, kw_only=True):
    """How far a mode of the CPU engine is from `emulate`, over all predicted tokens.

    Attributes:
        mode: the mode.
        kl_nats: mean Kullback-Leibler divergence of the next-token distribution in `emulate` from that in the mode.
        top1_agreement: share of positions with the same most likely token.
    """

    mode: str
    kl_nats: float
    top1_agreement: float


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Teacher-forced metrics over all predicted tokens.

    Attributes:
        tokens: number of tokens predicted.
        perplexity: exp of the mean negative log-likelihood under the bundle.
        reference_perplexity: the same under the float32 reference.
        perplexity_ratio: perplexity over reference_perplexity.
        perplexity_ratio_error: standard error of the ratio, from the spread of the tokens' log-likelihood differences.
        kl_nats: mean Kullback-Leibler divergence of the reference's next-token distribution from the bundle's, nats.
        kl_99_nats: 99 % of the tokens have at most this divergence, nats.
        kl_most_nats: the largest divergence of a token, nats.
        top1_agreement: share of positions with the same most likely token.
        sqnr_db: SQNR of the logits summed over all tokens, dB. A few tokens with large logits can dominate it.
        token_sqnr_db: mean of the SQNR of each token's logits, dB, at all positions but 0.
        least_token_sqnr_db: the lowest of them, dB.
        first_sqnr_db: mean SQNR of the logits at position 0, dB; None if none were measured.
        engine: name of the engine.
        text: name of the text.
        words: WikiText word perplexity, if it was asked for.
        agreement: with the mode `emulate`, if the engine computed in another one.
        chat: on a conversation in the checkpoint's chat template, and on the tokens of the template alone; empty
            without a template.
    """

    tokens: int
    perplexity: float
    reference_perplexity: float
    perplexity_ratio: float
    perplexity_ratio_error: float
    kl_nats: float
    kl_99_nats: float
    kl_most_nats: float
    top1_agreement: float
    sqnr_db: float
    token_sqnr_db: float
    least_token_sqnr_db: float
    engine: str
    text: str
    first_sqnr_db: float | None = None
    words: WordPerplexity | None = None
    agreement: ModeAgreement | None = None
    chat: tuple[QualityRecord, ...] = ()


class Tally:
    """Accumulates the metrics window by window."""

    def __init__(self) -> None:
        self._nll: list[NDArray[np.float64]] = []
        self._reference_nll: list[NDArray[np.float64]] = []
        self._kl: list[NDArray[np.float64]] = []
        self._signal: list[NDArray[np.float64]] = []
        self._noise: list[NDArray[np.float64]] = []
        self._is_first: list[NDArray[np.bool_]] = []
        self._agreed = 0

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self._kl)

    def add(self, window: Window, expected: Floats, actual: Floats, counted: NDArray[np.bool_] | None = None) -> None:
        """Add one window.

        Args:
            window: T tokens and what they predict.
            expected: logits of the reference `[T, V]`.
            actual: logits of the bundle `[T, V]`.
            counted: which of its targets count; None for all, and all rows.
        """
        expected, actual = expected[window.first :], actual[window.first :]
        positions, targets = np.arange(len(expected)) + window.first + window.position, window.targets
        if counted is not None:
            rows = np.flatnonzero(counted)
            expected, actual, positions, targets = expected[rows], actual[rows], positions[rows], targets[rows]
        count = len(targets)
        for first in range(0, count, _ROWS):
            tokens = targets[first : first + _ROWS]
            part = slice(first, first + len(tokens))
            exact, other = log_softmax(expected[part]), log_softmax(actual[part])
            chosen = np.arange(len(tokens)), tokens
            self._reference_nll.append(-exact[chosen])
            self._nll.append(-other[chosen])
            self._kl.append((np.exp(exact) * (exact - other)).sum(-1))
        self._agreed += int((actual[:count].argmax(-1) == expected[:count].argmax(-1)).sum())
        self._is_first.append(positions == 0)
        for first in range(0, len(expected), _ROWS):
            part = slice(first, first + _ROWS)
            self._signal.append(np.square(expected[part], dtype=np.float64).sum(-1))
            self._noise.append(np.square(actual[part] - expected[part], dtype=np.float64).sum(-1))

    def record(self, name: Literal["prose", "chat", "template"]) -> QualityRecord:
        """What a manifest keeps; rounded, so that threads and processors hardly change it."""
        found = self.evaluation("", "")
        return QualityRecord(
            text=name,
            tokens=found.tokens,
            kl_nats=_rounded(found.kl_nats),
            kl_most_nats=_rounded(found.kl_most_nats),
            top1_agreement=round(found.top1_agreement, 4),
            least_token_sqnr_db=round(found.least_token_sqnr_db, 1),
        )

    def evaluation(self, engine: str, text: str, pages: Pages | None = None) -> Evaluation:
        """The metrics over all windows, with word perplexity if they are those of `pages`."""
        nll, reference = np.concatenate(self._nll), np.concatenate(self._reference_nll)
        kl, ratio = np.concatenate(self._kl), _exp(float((nll - reference).mean()))
        signal, noise = (np.maximum(np.concatenate(each), _TINY) for each in (self._signal, self._noise))
        token_sqnr_db, is_first = 10 * np.log10(signal / noise), np.concatenate(self._is_first)
        first_db, rest_db = token_sqnr_db[is_first], token_sqnr_db[~is_first | is_first.all()]
        return Evaluation(
            tokens=len(nll),
            perplexity=_exp(float(nll.mean())),
            reference_perplexity=_exp(float(reference.mean())),
            perplexity_ratio=ratio,
            perplexity_ratio_error=ratio * float((nll - reference).std()) / math.sqrt(len(nll)),
            kl_nats=float(kl.mean()),
            kl_99_nats=float(np.quantile(kl, 0.99)),
            kl_most_nats=float(kl.max()),
            top1_agreement=self._agreed / len(nll),
            sqnr_db=10 * math.log10(float(signal.sum() / noise.sum())),
            token_sqnr_db=float(rest_db.mean()),
            least_token_sqnr_db=float(rest_db.min()),
            first_sqnr_db=float(first_db.mean()) if len(first_db) else None,
            engine=engine,
            text=text,
            words=None if pages is None else _words(pages, nll, reference),
        )


def _words(pages: Pages, nll: NDArray[np.float64], reference: NDArray[np.float64]) -> WordPerplexity:
    difference = nll - reference
    ratio = _exp(float(difference.sum()) / pages.words)
    return WordPerplexity(
        pages=pages.pages,
        pages_in_text=pages.pages_in_text,
        words=pages.words,
        perplexity=_exp(float(nll.sum()) / pages.words),
        reference_perplexity=_exp(float(reference.sum()) / pages.words),
        ratio=ratio,
        ratio_error=ratio * float(difference.std()) * math.sqrt(len(nll)) / pages.words,
    )


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    """Log-probabilities of logits `[..., V]`, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def _exp(nats: float) -> float:
    """exp; infinite where a float64 has no room, such as the perplexity of a broken model."""
    return math.exp(nats) if nats < _MOST_NATS else math.inf
