"""Metrics of logits, each against its definition, and what a single token can do to them."""

import math

import numpy as np
import pytest

from exporters.inspect.tally import Evaluation, Tally, TokenSums
from exporters.inspect.wikitext import Window

VOCAB = 50


def evaluated(expected: np.ndarray, actual: np.ndarray, window: np.ndarray) -> Evaluation:
    tally = Tally()
    for first in range(0, len(window), 100):
        part = slice(first, first + 100)
        tally.add(Window.of(window[part]), expected[part], actual[part])
    return tally.evaluation("cpu", "text")


@pytest.fixture
def logits(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    expected = rng.normal(0, 3, (200, VOCAB)).astype(np.float32)
    actual = expected + rng.normal(0, 0.1, expected.shape).astype(np.float32)
    return expected, actual, rng.integers(0, VOCAB, 200)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def test_metrics_follow_their_definitions(logits):
    expected, actual, window = logits
    found = evaluated(expected, actual, window)
    p, q = (
        np.exp(each) / np.exp(each).sum(-1, keepdims=True) for each in (expected.astype(float), actual.astype(float))
    )
    predicted = np.flatnonzero(np.arange(200) % 100 != 99)
    nll = -np.log(q[predicted, window[predicted + 1]])
    reference = -np.log(p[predicted, window[predicted + 1]])
    assert found.tokens == 198
    assert found.perplexity == pytest.approx(np.exp(nll.mean()), rel=1e-5)
    assert found.perplexity_ratio == pytest.approx(np.exp(nll.mean() - reference.mean()), rel=1e-5)
    assert found.perplexity_ratio_error == pytest.approx(
        found.perplexity_ratio * (nll - reference).std() / 198**0.5, rel=1e-4
    )
    assert found.kl_nats == pytest.approx((p * np.log(p / q)).sum(-1)[predicted].mean(), rel=1e-4)
    assert found.top1_agreement == (p.argmax(-1) == q.argmax(-1))[predicted].mean()
    levels = 10 * np.log10((expected**2).sum(-1) / ((actual - expected) ** 2).sum(-1))
    rest = levels[np.arange(200) % 100 != 0]
    assert found.token_sqnr_db == pytest.approx(rest.mean(), abs=1e-3)
    assert found.min_token_sqnr_db == pytest.approx(rest.min(), abs=1e-3)
    assert found.first_sqnr_db == pytest.approx((levels[0] + levels[100]) / 2, abs=1e-3)


def test_logits_may_come_some_columns_at_a_time(logits):
    expected, actual, tokens = logits
    expected[:, 30] += 80  # the largest is in a later block: earlier sums are rescaled
    whole, parts, window = Tally(), Tally(), Window(tokens, tokens[5:], 4, 1000)
    whole.add(window, expected, actual)
    sums = TokenSums(window)
    for first in range(0, VOCAB, 7):
        sums.add(expected[:, first : first + 7], actual[:, first : first + 7])
    parts.add_sums(sums)
    wanted, found = (each.evaluation("cpu", "text") for each in (whole, parts))
    numbers = {
        name: value for name in Evaluation.__struct_fields__ if isinstance(value := getattr(wanted, name), float)
    }
    assert len(numbers) == 11
    assert {name: getattr(found, name) for name in numbers} == pytest.approx(numbers, rel=1e-9, abs=1e-12)


def test_equal_logits_have_no_divergence(logits):
    expected, _, window = logits
    found = evaluated(expected, expected, window)
    assert (found.kl_nats, found.perplexity_ratio, found.perplexity_ratio_error, found.top1_agreement) == (0, 1, 0, 1)


def test_one_loud_token_owns_the_sum_but_not_the_mean_over_tokens(logits):
    """An exact token of a thousand times the energy hides the error of all others from a sum."""
    expected, actual, window = logits
    before = evaluated(expected, actual, window)
    expected[5] *= 1000
    actual[5] = expected[5]
    after = evaluated(expected, actual, window)
    assert after.sqnr_db > before.sqnr_db + 20
    assert after.first_sqnr_db == before.first_sqnr_db
    assert after.min_token_sqnr_db == before.min_token_sqnr_db
    assert after.kl_nats == pytest.approx(before.kl_nats, rel=0.05)


def test_a_broken_model_has_an_infinite_perplexity():
    tally = Tally()
    tokens = np.arange(5)
    broken = np.full((5, 8), 1e6, np.float32)
    broken[np.arange(4), tokens[1:]] = 0
    tally.add(Window.of(tokens), np.zeros((5, 8), np.float32), broken)
    found = tally.evaluation("cpu", "text")
    assert found.perplexity == found.perplexity_ratio == math.inf
    assert found.kl_max_nats == pytest.approx(found.kl_nats)
