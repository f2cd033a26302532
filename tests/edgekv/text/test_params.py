from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from edgekv.errors import UsageError
from edgekv.text import BeamParams, SamplingParams
from edgekv.text.params import choose_params

HUGE = 10**5000
"""Python refuses to write it."""
DEFAULTS = SamplingParams(0.7, top_k=20, top_p=0.8, repetition_penalty=1.1, max_new_tokens=99)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 1e-310}, "temperature: got 1e-310; expected 0, or at least 0.00001"),
        ({"temperature": math.inf}, "temperature: got inf"),
        ({"temperature": "warm"}, "temperature: got 'warm'; expected a number"),
        ({"temperature": HUGE}, "temperature: got a number of 16610 bits"),
        ({"temperature": True}, "temperature: got True"),
        ({"temperature": 1.0, "seed": HUGE}, "seed: got a number of 16610 bits; expected a whole number from 0 on"),
        ({"temperature": 1.0, "seed": 2**64}, "seed: got 18446744073709551616"),
        ({"temperature": 1.0, "top_k": 2**32}, "top_k: got 4294967296; expected at least 1, at most 2147483647"),
        ({"temperature": 1.0, "top_k": 1.5}, "top_k: got 1.5"),
        ({"temperature": 1.0, "min_p": 1.1}, "min_p: got 1.1; expected 0 to 1"),
        ({"min_p": 0.1}, "min_p: got 0.1 at temperature 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: got 0.0; expected 0.000001 to 1,000,000"),
        ({"repetition_penalty": math.inf}, "repetition_penalty: got inf"),
        ({"presence_penalty": 3}, "presence_penalty: got 3; expected -2 to 2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty: got nan"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: got -1"),
        ({"logit_bias": {2**32: 1.0}}, "logit_bias: got 4294967296"),
        ({"logit_bias": {1: math.inf}}, "logit_bias: got inf for token 1"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0; expected at least 1"),
        ({"max_new_tokens": HUGE}, "max_new_tokens: got a number of 16610 bits"),
        ({"stop": ["x", ""]}, "stop: got an empty text"),
        ({"stop": [3]}, "stop: got 3; expected texts"),
        ({"stop": 5}, "stop: got 5; expected texts"),
        ({"logit_bias": 5}, "logit_bias: got 5; expected numbers by token id"),
    ],
)
def test_what_cannot_be_sampled_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize("given", [1.5, "12", [3], True, HUGE, {"temperature": 1.0}], ids=lambda each: str(type(each)))
def test_what_is_neither_parameters_nor_a_number_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="max_new_tokens: got"):
        choose_params(given, {}, DEFAULTS)


def test_parameters_are_plain_values() -> None:
    one = SamplingParams(logit_bias={3: -1}, stop="end")
    assert one == SamplingParams(logit_bias={3: -1.0}, stop=["end"])
    assert (one.logit_bias, one.stop) == ({3: -1.0}, ("end",))
    assert SamplingParams().greedy


def test_what_is_not_given_comes_from_the_defaults() -> None:
    chosen, set_by_bundle = choose_params(None, {"top_k": 5, "seed": 1, "stop": None}, DEFAULTS)
    assert chosen == SamplingParams(0.7, 5, 0.8, 1, repetition_penalty=1.1, max_new_tokens=99)
    assert set_by_bundle == ("temperature", "top_p", "repetition_penalty", "max_new_tokens")
    assert choose_params(7, {}, DEFAULTS)[0] == SamplingParams(0.7, 20, 0.8, repetition_penalty=1.1, max_new_tokens=7)


def test_a_temperature_of_0_drops_the_defaults_of_sampling() -> None:
    chosen, _ = choose_params(None, {"temperature": 0}, DEFAULTS)
    assert chosen == SamplingParams(repetition_penalty=1.1, max_new_tokens=99)
    with pytest.raises(UsageError, match="top_k: got 3 at temperature 0"):
        choose_params(None, {"temperature": 0, "top_k": 3}, DEFAULTS)


def test_parameters_are_used_as_they_are() -> None:
    given = SamplingParams(max_new_tokens=3)
    assert choose_params(given, {}, DEFAULTS) == (given, ())
    assert choose_params(given, {"seed": 5, "temperature": 1.0}, DEFAULTS)[0] == SamplingParams(
        1.0, seed=5, max_new_tokens=3
    )
    beams = BeamParams(3, max_new_tokens=4)
    assert choose_params(beams, {"num_return_sequences": 2}, DEFAULTS)[0] == BeamParams(3, 2, max_new_tokens=4)
    with pytest.raises(UsageError, match=r"top_p: got 0.5 with num_beams"):
        choose_params(beams, {"top_p": 0.5}, DEFAULTS)


@pytest.mark.slow
@given(
    st.dictionaries(
        st.sampled_from(["temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty"]),
        st.none() | st.floats() | st.integers() | st.text(max_size=3) | st.booleans(),
    )
)
def test_any_value_is_taken_or_refused_by_name(options: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**options)
    except UsageError as error:
        assert error.field in options
    else:
        assert params.greedy or params.temperature >= 1e-5
