"""Integers in groups with real scales, on the grid of LPBQ."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from quant import rescale
from quant.rescale import _closest

RANDOM = np.random.default_rng(0)
INTEGERS = RANDOM.integers(-8, 8, (256, 24)).astype(np.int8)
SCALES = RANDOM.uniform(0.001, 0.01, 24).astype(np.float32)
LEVELS = RANDOM.integers(1, 16, (4, 24)).astype(np.float32)


def test_steps_that_are_multiples_of_one_scale_change_nothing() -> None:
    weight = rescale(INTEGERS, SCALES * LEVELS, "lpbq64")
    np.testing.assert_array_equal(weight.integers, INTEGERS)
    np.testing.assert_allclose(weight.dequantize(), INTEGERS * np.repeat(SCALES * LEVELS, 64, axis=0), rtol=1e-6)


def test_a_block_of_zeros_may_have_any_step() -> None:
    """What it is worth for the others is nothing."""
    integers, steps = INTEGERS.copy(), SCALES * LEVELS
    integers[:64] = 0
    steps[0] *= np.float32(0.7321)
    weight = rescale(integers, steps, "lpbq64")
    np.testing.assert_array_equal(weight.integers, integers)
    np.testing.assert_allclose(weight.dequantize(), integers * np.repeat(steps, 64, axis=0), rtol=1e-6)


@given(st.integers(0, 2**32 - 1))
def test_other_integers_are_rounded_to_the_nearest_on_the_new_grid(seed: int) -> None:
    random = np.random.default_rng(seed)
    integers = random.integers(-8, 8, (128, 4)).astype(np.int8)
    steps = random.uniform(0.5, 5.0, (4, 4)).astype(np.float32)
    weight = rescale(integers, steps, "lpbq32")
    exact, new = integers * np.repeat(steps, 32, axis=0), weight.grid.steps(128)
    least, most = weight.grid.limits
    np.testing.assert_array_equal(weight.integers, np.clip(np.rint(exact / new), least, most))
    assert np.mean(weight.integers != integers) < 0.2


@given(st.integers(0, 2**32 - 1))
def test_no_scale_is_much_closer(seed: int) -> None:
    """Of 3,000 that are tried, weighted by the energy of what they multiply."""
    random = np.random.default_rng(seed)
    steps, energy = random.uniform(0.2, 3.0, (6, 1)), random.uniform(0.01, 1.0, (6, 1))

    def error(scales: np.ndarray, levels: np.ndarray) -> np.ndarray:
        return (energy * np.square(steps - scales * levels)).sum(axis=0)

    tried = steps.max() / np.linspace(1, 15.5, 3000)
    best = error(tried, np.clip(np.rint(steps / tried), 1, 15)).min()
    scales, levels = _closest(steps, energy)
    assert levels.min() >= 1 and levels.max() <= 15
    assert error(scales, levels)[0] <= 1.5 * best + 1e-4 * energy.sum()


@pytest.mark.parametrize(("groups", "dtype"), [(4, "int4"), (3, "lpbq64"), (8, "lpbq64")])
def test_blocks_that_do_not_divide_the_groups_are_refused(groups: int, dtype: str) -> None:
    with pytest.raises(ValueError, match=rf"steps: got {groups} groups of 256 inputs; expected a multiple of"):
        rescale(INTEGERS, np.ones((groups, 24), np.float32), dtype)
