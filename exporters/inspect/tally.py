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

Doubles = NDArray[np.float64]

_TINY = 1e-30
_MAX_NATS = 700.0
_ROWS = 64  # tokens at a time: sums are float64


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
        kl_max_nats: the largest divergence of a token, nats.
        top1_agreement: share of positions with the same most likely token.
        sqnr_db: SQNR of the logits summed over all tokens, dB. A few tokens with large logits can dominate it.
        token_sqnr_db: mean of the SQNR of each token's logits, dB, at all positions but 0.
        min_token_sqnr_db: the lowest of them, dB.
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
    kl_max_nats: float
    top1_agreement: float
    sqnr_db: float
    token_sqnr_db: float
    min_token_sqnr_db: float
    engine: str
    text: str
    first_sqnr_db: float | None = None
    words: WordPerplexity | None = None
    agreement: ModeAgreement | None = None
    chat: tuple[QualityRecord, ...] = ()


class _Softmax:
    """What the softmax of each of `n` rows of logits needs, some columns at a time, and their largest element.

    Attributes:
        total: sum of exp(logit - peak).
        top: column of the largest logit, the first of equal ones.
        chosen: logit of the target.
    """

    __slots__ = ("_peak", "_targets", "chosen", "top", "total")

    def __init__(self, targets: NDArray[np.int64]) -> None:
        self._targets = targets
        self._peak = np.full(len(targets), -np.inf)
        self.total, self.chosen = np.zeros(len(targets)), np.zeros(len(targets))
        self.top = np.zeros(len(targets), np.int64)

    def add(self, rows: slice, first: int, logits: Doubles) -> tuple[Doubles, Doubles]:
        """Add the columns `[n, columns]` from `first` on of some rows.

        Returns:
            exp(logit - peak), and what sums of it until now are to be multiplied by.
        """
        highest, before = logits.max(-1), self._peak[rows].copy()
        peak = self._peak[rows] = np.maximum(before, highest)
        self.top[rows] = np.where(highest > before, first + logits.argmax(-1), self.top[rows])
        weights, kept = np.exp(logits - peak[:, None]), np.exp(before - peak)
        self.total[rows] = self.total[rows] * kept + weights.sum(-1)
        targets = self._targets[rows] - first
        (here,) = np.nonzero((targets >= 0) & (targets < logits.shape[1]))
        self.chosen[rows.start + here] = logits[here, targets[here]]
        return weights, kept

    @property
    def normalizer(self) -> Doubles:
        """The logarithm of the sum of exp(logit), `[n]`."""
        logarithm: Doubles = self._peak + np.log(self.total)
        return logarithm


class TokenSums:
    """Sums over the vocabulary for each token of one window, some columns of the logits at a time.

    The divergence is sum p (a - b) - log sum exp a + log sum exp b, with logits a and b and p = softmax a.
    """

    def __init__(self, window: Window) -> None:
        rows = len(window.inputs) - window.first
        self._first = window.first
        self._columns = 0
        self._exact, self._other = _Softmax(window.targets), _Softmax(window.targets)
        self._apart = np.zeros(len(window.targets))
        self.signal, self.noise = np.zeros(rows), np.zeros(rows)
        self.is_first: NDArray[np.bool_] = np.arange(rows) + window.first + window.position == 0

    def add(self, expected: Floats, actual: Floats) -> None:
        """Add the next columns.

        Args:
            expected: logits of the reference `[T, columns]`.
            actual: logits of the bundle `[T, columns]`.
        """
        expected, actual = expected[self._first :], actual[self._first :]
        for start in range(0, len(expected), _ROWS):
            rows = slice(start, start + _ROWS)
            exact, other = expected[rows].astype(np.float64), actual[rows].astype(np.float64)
            error = exact - other
            self.signal[rows] += np.square(exact).sum(-1)
            self.noise[rows] += np.square(error).sum(-1)
            if count := len(self._apart[rows]):
                weights, kept = self._exact.add(rows, self._columns, exact[:count])
                self._apart[rows] = self._apart[rows] * kept + (weights * error[:count]).sum(-1)
                self._other.add(rows, self._columns, other[:count])
        self._columns += expected.shape[1]

    @property
    def kl(self) -> Doubles:
        """Divergence of the reference's distribution from the bundle's at each target, nats."""
        apart: Doubles = self._apart / self._exact.total - self._exact.normalizer + self._other.normalizer
        return apart

    @property
    def nll(self) -> tuple[Doubles, Doubles]:
        """Negative log-likelihood of each target under the reference and under the bundle."""
        return self._exact.normalizer - self._exact.chosen, self._other.normalizer - self._other.chosen

    @property
    def agrees(self) -> NDArray[np.bool_]:
        """Whether both have the same most likely token at each target."""
        same: NDArray[np.bool_] = self._exact.top == self._other.top
        return same


class Tally:
    """Accumulates the metrics window by window."""

    def __init__(self) -> None:
        self._nll: list[Doubles] = []
        self._reference_nll: list[Doubles] = []
        self._kl: list[Doubles] = []
        self._signal: list[Doubles] = []
        self._noise: list[Doubles] = []
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
        sums = TokenSums(window)
        sums.add(expected, actual)
        self.add_sums(sums, counted)

    def add_sums(self, sums: TokenSums, counted: NDArray[np.bool_] | None = None) -> None:
        """Add one window, of which all columns were added; `counted` as for `add`."""
        targets: slice | NDArray[np.intp] = slice(None) if counted is None else np.flatnonzero(counted)
        reference_nll, nll = sums.nll
        self._reference_nll.append(reference_nll[targets])
        self._nll.append(nll[targets])
        self._kl.append(sums.kl[targets])
        self._agreed += int(sums.agrees[targets].sum())
        self._is_first.append(sums.is_first[targets])
        self._signal.append(sums.signal[targets])
        self._noise.append(sums.noise[targets])

    def record(self, name: Literal["prose", "chat", "template", "short"]) -> QualityRecord:
        """What a manifest keeps; rounded, so that threads and processors hardly change it."""
        evaluation = self.evaluation("", "")
        return QualityRecord(
            text=name,
            tokens=evaluation.tokens,
            kl_nats=_rounded(evaluation.kl_nats),
            kl_max_nats=_rounded(evaluation.kl_max_nats),
            top1_agreement=round(evaluation.top1_agreement, 4),
            min_token_sqnr_db=round(evaluation.min_token_sqnr_db, 1),
        )

    def evaluation(self, engine: str, text: str, pages: Pages | None = None) -> Evaluation:
        """The metrics over all windows, with word perplexity if they are those of `pages`."""
        nll, reference = np.concatenate(self._nll), np.concatenate(self._reference_nll)
        kl, ratio = np.concatenate(self._kl), _exp(float((nll - reference).mean()))
        signal, noise = (np.maximum(np.concatenate(powers), _TINY) for powers in (self._signal, self._noise))
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
            kl_max_nats=float(kl.max()),
            top1_agreement=self._agreed / len(nll),
            sqnr_db=10 * math.log10(float(signal.sum() / noise.sum())),
            token_sqnr_db=float(rest_db.mean()),
            min_token_sqnr_db=float(rest_db.min()),
            first_sqnr_db=float(first_db.mean()) if len(first_db) else None,
            engine=engine,
            text=text,
            words=None if pages is None else _words(pages, nll, reference),
        )


def _words(pages: Pages, nll: Doubles, reference: Doubles) -> WordPerplexity:
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


def log_softmax(logits: Floats) -> Doubles:
    """Log-probabilities of logits `[..., V]`, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def _exp(nats: float) -> float:
    """exp; infinite where a float64 has no room, such as the perplexity of a broken model."""
    return math.exp(nats) if nats < _MAX_NATS else math.inf
