from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from edgekv.errors import UsageError
from edgekv.text import Sampler, SamplingParams
from edgekv.text.sampler import most_likely
from quant import Encoding

Logits = NDArray[Any]

ENCODING = Encoding("u16", 0.01, 30000)
GOLDEN = [872, 82, 14, 442, 61, 454]
LOGITS = hnp.arrays(np.uint16, st.integers(1, 40), elements=st.integers(29000, 31000))


def _sampler(**options: Any) -> Sampler:
    return Sampler(SamplingParams(**options), ENCODING)


@given(LOGITS)
def test_greedy_takes_the_first_of_the_most_likely(logits: Logits) -> None:
    assert _sampler()(logits) == int(np.argmax(ENCODING.dequantize(logits)))


@given(LOGITS, st.integers(0, 2**32))
def test_the_best_one_of_one_is_greedy(logits: Logits, seed: int) -> None:
    assert _sampler(temperature=2.0, top_k=1, seed=seed)(logits) == _sampler()(logits)


@given(LOGITS, st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_tokens(logits: Logits, seed: int) -> None:
    first, second = (_sampler(temperature=1.0, seed=seed) for _ in range(2))
    assert [first(logits, range(i)) for i in range(8)] == [second(logits, range(i)) for i in range(8)]


@given(LOGITS, st.floats(0.05, 5.0))
def test_probabilities_are_the_softmax(logits: Logits, temperature: float) -> None:
    order, probabilities = _sampler(temperature=temperature).distribution(logits)
    weights = np.exp((ENCODING.dequantize(logits).astype(np.float64) - ENCODING.dequantize(logits).max()) / temperature)
    np.testing.assert_allclose(probabilities, (weights / weights.sum())[order], rtol=1e-6)
    assert sorted(order) == list(range(len(logits)))


@given(LOGITS, st.integers(1, 50))
def test_top_k_keeps_the_k_most_likely(logits: Logits, k: int) -> None:
    order, probabilities = _sampler(temperature=1.0, top_k=k).distribution(logits)
    assert len(order) == min(k, len(logits))
    assert logits[order].tolist() == sorted(logits.tolist(), reverse=True)[: len(order)]
    assert probabilities.sum() == pytest.approx(1)


@given(LOGITS, st.floats(0.01, 1.0))
def test_top_p_keeps_the_fewest_that_reach_p(logits: Logits, p: float) -> None:
    _, everything = _sampler(temperature=1.0).distribution(logits)
    order, probabilities = _sampler(temperature=1.0, top_p=p).distribution(logits)
    assert everything[: len(order) - 1].sum() < p
    assert everything[: len(order)].sum() >= p - 1e-9
    assert probabilities.sum() == pytest.approx(1)


def test_tokens_come_as_often_as_they_are_likely() -> None:
    logits = np.array([30000, 30100, 29900], np.uint16)
    sampler = _sampler(temperature=1.0, seed=1)
    counts = np.bincount([sampler(logits, range(i)) for i in range(4000)], minlength=3)
    order, probabilities = sampler.distribution(logits)
    np.testing.assert_allclose(counts[order] / 4000, probabilities, atol=0.03)


def test_a_seed_that_was_drawn_can_be_used_again() -> None:
    logits = np.full(1000, 30000, np.uint16)
    drawn = _sampler(temperature=1.0)
    again = _sampler(temperature=1.0, seed=drawn.seed)
    assert [drawn(logits, range(i)) for i in range(4)] == [again(logits, range(i)) for i in range(4)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k: got 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p: got 0.0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p: got 1.5"),
        ({"temperature": 1.0, "seed": -1}, "seed: got -1"),
        ({"top_k": 5}, "top_k: got 5 at temperature 0"),
        ({"seed": 5}, "seed: got 5 at temperature 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**options)


@given(LOGITS, st.floats(0.01, 1.0))
def test_min_p_drops_what_is_far_less_likely_than_the_best(logits: Logits, p: float) -> None:
    _, everything = _sampler(temperature=1.0).distribution(logits)
    order, probabilities = _sampler(temperature=1.0, min_p=p).distribution(logits)
    assert len(order) == np.count_nonzero(everything >= p * everything[0])
    assert probabilities.sum() == pytest.approx(1)


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_the_random_number_depends_on_seed_and_position_alone(seed: int, position: int) -> None:
    """A text that is resumed anywhere continues in the same way."""
    logits = np.full(1000, 30000, np.uint16)
    whole, resumed = _sampler(temperature=1.0, seed=seed), _sampler(temperature=1.0, seed=seed)
    whole(logits, range(5), range(7))
    assert whole(logits, range(position)) == resumed(logits, (), range(position))


def test_the_same_seed_gives_these_tokens_in_every_release() -> None:
    logits = np.full(1000, 30000, np.uint16)
    sampler = _sampler(temperature=1.0, seed=7)
    assert [sampler(logits, range(position)) for position in range(6)] == GOLDEN


@given(LOGITS, st.integers(1, 50))
def test_the_k_most_likely_are_found_without_sorting_all(logits: Logits, k: int) -> None:
    k = min(k, len(logits))
    assert (
        most_likely(logits.astype(np.int64), k).tolist()
        == np.argsort(-logits.astype(np.int64), kind="stable")[:k].tolist()
    )
