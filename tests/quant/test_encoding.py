import numpy as np
import pytest
from hypothesis import given, strategies as st

from quant import DTYPES, Encoding, Range, quantize_per_channel

dtypes = st.sampled_from(sorted(DTYPES))
reals = st.floats(-1e4, 1e4, width=32)


@given(reals, reals, dtypes)
def test_asymmetric_covers_its_range_and_holds_zero_exactly(a, b, dtype):
    low, high = min(a, b), max(a, b)
    encoding = Encoding.asymmetric(low, high, dtype)
    step = encoding.scale
    assert encoding.reach[0] <= low + step and encoding.reach[1] >= high - step
    info = np.iinfo(DTYPES[dtype])
    assert step == pytest.approx((max(high, 0) - min(low, 0)) / (int(info.max) - info.min), rel=1e-6, abs=2e-38)
    assert encoding.dequantize(encoding.quantize(np.zeros(1)))[0] == 0.0


@given(st.floats(1e-3, 1e4), st.sampled_from(["u8", "s16"]), st.lists(st.floats(-1, 1), min_size=1))
def test_values_in_reach_return_within_half_a_step(absmax, dtype, fractions):
    encoding = Encoding.symmetric(absmax, dtype)
    values = np.array(fractions, np.float32) * np.float32(encoding.reach[1])
    error = np.abs(encoding.dequantize(encoding.quantize(values)) - values)
    assert (error <= encoding.scale * 0.501).all()


@given(dtypes, st.integers(0, 2**16))
def test_integers_survive_the_round_trip(dtype, seed):
    info = np.iinfo(DTYPES[dtype])
    integers = np.random.default_rng(seed).integers(info.min, info.max + 1, 50).astype(DTYPES[dtype])
    encoding = Encoding.asymmetric(-3.0, 5.0, dtype)
    assert (encoding.quantize(encoding.dequantize(integers)) == integers).all()


def test_the_middle_of_u8_is_128():
    assert Encoding.symmetric(1.0, "u8").zero_point == 128
    assert Encoding.symmetric(1.0, "s16").zero_point == 0


@pytest.mark.parametrize(
    ("dtype", "scale", "zero_point", "field"),
    [
        ("u4", 1.0, 0, "dtype"),
        ("u8", 0.0, 0, "scale"),
        ("u8", float("nan"), 0, "scale"),
        ("u8", 1e300, 0, "scale: got 1e\\+300; .* within float32"),
        ("s8", 1.0, 128, "zero_point"),
    ],
)
def test_an_encoding_that_cannot_be_is_refused_by_field(dtype, scale, zero_point, field):
    with pytest.raises(ValueError, match=field):
        Encoding(dtype, scale, zero_point)


def test_the_largest_step_is_that_of_float32():
    assert Encoding("u8", float(np.finfo(np.float32).max), 0).scale > 3e38


def test_a_head_is_a_slice_of_the_quantized_matrix():
    weight = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)
    whole = quantize_per_channel(weight)
    for start in range(0, 12, 4):
        head, direct = whole.columns(start, start + 4), quantize_per_channel(weight[:, start : start + 4])
        assert (head.integers == direct.integers).all() and (head.scales == direct.scales).all()


def test_weights_return_within_half_a_step_of_their_channel():
    weight = np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32) * np.arange(1, 17)
    quantized = quantize_per_channel(weight)
    assert (np.abs(quantized.dequantize() - weight) <= quantized.scales * 0.501).all()


def test_clipping_beats_covering_where_outliers_are_rare():
    values = np.random.default_rng(2).standard_normal(50000).astype(np.float32)
    values[0] = 12.0
    seen = Range()
    for window in np.split(values, 16):
        seen.observe(window, keep_sample=True)

    def error(encoding):
        return float(np.square(encoding.dequantize(encoding.quantize(values)) - values).mean())

    assert error(seen.symmetric("u8")) < 0.85 * error(Encoding.symmetric(seen.absmax, "u8"))


@given(dtypes, st.integers(0, 255), st.floats(2**-10, 2**10))
def test_times_lets_the_same_integers_stand_for_multiples(dtype, integer, factor):
    encoding = Encoding.asymmetric(-1.0, 3.0, dtype)
    integers = np.array([integer]).astype(DTYPES[dtype])
    assert encoding.times(factor).dequantize(integers) == pytest.approx(
        factor * encoding.dequantize(integers), rel=1e-6
    )
