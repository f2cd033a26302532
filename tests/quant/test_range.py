"""What calibration saw of a tensor, and the encodings that follow from it."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgekv.errors import UsageError
from edgekv.spec import EncodingTypes, Result
from exporters.quantize.encodings import result_encodings
from quant import Encoding
from quant.ranges import LARGEST, Range


def test_no_encoding_follows_from_a_range_without_a_value() -> None:
    """It would be 1e-38: every value of every text would be clipped to zero."""
    types, results = (
        EncodingTypes("u16", "u8"),
        {"states": Result("tail", ("states",)), "shares": Result("softmax", ("x",))},
    )
    seen = Range()
    seen.observe(np.zeros((0, 4), np.float32))
    for ranges in ({}, {"states": Range()}, {"states": seen}):
        with pytest.raises(UsageError, match="calibration: got no value of states; expected values of every result"):
            result_encodings(results, ranges, types)
    seen.observe(np.ones((1, 4), np.float32))
    assert result_encodings(results, {"states": seen}, types)["states"].reach[1] > 1


BOUNDS = st.tuples(st.floats(-100, 0), st.floats(0, 100))


@given(st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1), min_size=1))
def test_a_range_has_the_extremes_of_all_values_and_zero(batches: list[list[float]]) -> None:
    found = Range()
    for values in batches:
        found.observe(np.array(values, np.float32))
    seen = [0.0, *(value for values in batches for value in values)]
    assert (found.low, found.high, found.absmax) == (min(seen), max(seen), max(map(abs, seen)))
    assert not len(found.sample)


@given(BOUNDS, BOUNDS, st.floats(1, 3))
def test_a_range_is_widened_on_both_sides_by_a_multiple_of_its_magnitude_at_most(
    own: tuple[float, float], other: tuple[float, float], most: float
) -> None:
    found = Range(*own)
    bound = most * found.absmax
    found.widen(Range(*other), most)
    assert (found.low, found.high) == (min(own[0], max(other[0], -bound)), max(own[1], min(other[1], bound)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2e9, -2e9])
def test_values_that_no_working_model_has_are_refused(value: float) -> None:
    found = Range(-1.0, 1.0)
    with pytest.raises(ValueError, match="values: got"):
        found.observe(np.array([0.0, value], np.float32))
    assert (found.low, found.high) == (-1.0, 1.0)


def test_the_largest_value_of_a_working_model_is_taken() -> None:
    found = Range()
    found.observe(np.array([-LARGEST, LARGEST]))
    assert (found.low, found.high) == (-LARGEST, LARGEST)


def test_every_element_of_a_head_is_in_the_sample() -> None:
    """Its width is even, and so would a step between elements be that skips some."""
    found = Range()
    found.observe(np.tile(np.arange(64, dtype=np.float32), 1000), keep_sample=True)
    assert {*found.sample.tolist()} == {*range(64)} and 3000 < len(found.sample) < 5000


def test_the_symmetric_encoding_has_the_min_error_on_the_sample() -> None:
    """Of a normal distribution with one value far outside, which is clipped; without a sample nothing is."""
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    values[0] = 8.0
    found = Range()
    found.observe(values, keep_sample=True)
    chosen, whole = found.symmetric("u8"), Encoding.symmetric(8.0, "u8")

    def error(encoding: Encoding) -> float:
        return float(np.square(encoding.dequantize(encoding.quantize(values)) - values).mean())

    assert chosen.scale < whole.scale and error(chosen) < error(whole)
    assert error(chosen) <= min(error(Encoding.symmetric(8.0 * clip, "u8")) for clip in np.linspace(0.5, 1, 6)) * 1.05
    assert Range(-8.0, 3.0).symmetric("u8") == whole


def test_the_sample_of_a_long_text_stays_small_and_has_every_element() -> None:
    found, rows = Range(), np.tile(np.arange(64, dtype=np.float32), (512, 1))
    for _ in range(300):
        found.observe(rows, keep_sample=True)
    assert 40_000 < len(found.sample) <= 1 << 17
    counts = np.bincount(found.sample.astype(np.int64), minlength=64)
    assert counts.min() > 0.8 * counts.max()


def test_a_result_times_a_constant_keeps_its_integers() -> None:
    """On the HTP another encoding is rounded in another way for one row than for several."""
    results = {"x": Result("tanh", ("x",)), "y": Result("product", ("y",), scaled=("x", 30.0))}
    found = result_encodings(results, {"x": Range(-0.5, 0.5), "y": Range(-15.0, 15.0)}, EncodingTypes("u16", "u8"))
    assert found["y"] == found["x"].times(30.0)
