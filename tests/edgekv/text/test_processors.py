from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgekv.errors import UsageError
from edgekv.text import Sampler, SamplingParams
from edgekv.text.sampler import processors_of
from quant import Encoding

VOCAB = 12
ENCODING = Encoding("u16", 0.01, 30000)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=20)
LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB)


def _processed(params: SamplingParams, prompt: list[int], generated: list[int], logits: list[float]) -> list[float]:
    values: Any = np.array(logits, np.float32)
    for processor in processors_of(params, VOCAB):
        values = processor(prompt, generated, values)
    return [float(value) for value in values]


@given(TOKENS, TOKENS, LOGITS, st.floats(0.1, 3), st.floats(-2, 2), st.floats(-2, 2))
def test_penalties_are_those_of_transformers_and_vllm(
    prompt: list[int], generated: list[int], logits: list[float], repetition: float, presence: float, frequency: float
) -> None:
    """Token by token, as their documentation says."""
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    counts, expected = Counter(generated), []
    for token, value in enumerate(logits):
        if token in prompt or token in generated:
            value = value / repetition if value > 0 else value * repetition
        expected.append(value - frequency * counts[token] - presence * (counts[token] > 0))
    np.testing.assert_allclose(_processed(params, prompt, generated, logits), expected, rtol=1e-4, atol=1e-4)


def test_a_bias_is_added_before_the_penalties() -> None:
    params = SamplingParams(logit_bias={0: 2.0, 3: float("-inf")}, repetition_penalty=2.0)
    assert _processed(params, [0], [], [1.0] * VOCAB)[:4] == [1.5, 1.0, 1.0, float("-inf")]


def test_a_bias_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match=r"logit_bias: got id 12; expected 0 to 11, the model's vocabulary"):
        processors_of(SamplingParams(logit_bias={VOCAB: 1.0}), VOCAB)


def test_nothing_asked_for_is_nothing_done() -> None:
    assert processors_of(SamplingParams(), VOCAB) == []
    assert processors_of(SamplingParams(0.5, top_k=3), VOCAB) == []


def _integers(*values: float) -> Any:
    return np.array([round(value / ENCODING.scale) + ENCODING.zero_point for value in values], np.uint16)


def test_greedy_choice_follows_the_processors() -> None:
    logits = _integers(3.0, 2.0, 1.0)
    params = SamplingParams(frequency_penalty=0.6)
    sampler = Sampler.of(params, ENCODING, 3)
    generated: list[int] = []
    for _ in range(6):
        generated.append(sampler(logits, (), generated))
    assert generated == [0, 0, 1, 0, 1, 0]


def test_a_processor_of_ones_own_sees_prompt_and_text() -> None:
    seen = []

    def forbid(prompt: Any, generated: Any, logits: Any) -> Any:
        seen.append((tuple(prompt), tuple(generated), logits.dtype))
        logits[0] = -np.inf
        return logits

    sampler = Sampler.of(SamplingParams(1.0, seed=3), ENCODING, 3, [forbid])
    assert 0 not in [sampler(_integers(9.0, 0.0, 0.0), (5, 6), range(n)) for n in range(50)]
    assert seen[2] == ((5, 6), (0, 1), np.float32)


@pytest.mark.parametrize("wrong", [lambda p, g, x: x[:2], lambda p, g, x: x * np.nan, lambda p, g, x: x - np.inf])
def test_a_processor_that_leaves_nothing_to_choose_from_is_refused(wrong: Any) -> None:
    for params in (SamplingParams(), SamplingParams(1.0)):
        with pytest.raises(UsageError, match=r"logits: got .* Correct the logits processor"):
            Sampler.of(params, ENCODING, 3, [wrong])(_integers(1.0, 2.0, 3.0))
