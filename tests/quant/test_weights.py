import os
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgekv.runtime import find_engines
from exporters.quantize.recipe import find_recipe
from quant import WEIGHT_TYPES, Grid, LayerInputs, WeightDtype, pack_int4, quantize, unpack_int4
from quant.cholesky import cholesky, corner_inverses, solve
from quant.grids import _STEPS, NARROWEST, _between, choose_grid

RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.standard_normal((256, 24)).astype(np.float32)
MIXED = RANDOM.standard_normal((256, 256)).astype(np.float32) / 16
INPUTS = RANDOM.standard_normal((2048, 256)).astype(np.float32) * np.linspace(0.1, 2, 256, dtype=np.float32) @ MIXED


def output_error(quantized, exact=INPUTS, inputs=INPUTS) -> float:
    return float(np.square(inputs @ quantized.dequantize() - exact @ WEIGHT).mean())


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_no_method_is_worse_than_the_one_before(dtype):
    sums = LayerInputs(INPUTS, INPUTS)
    nearest, search, gptq, descent, blocks = (
        output_error(quantize(WEIGHT, dtype, method, sums))
        for method in ("nearest", "search", "gptq", "descent", "blocks")
    )
    assert blocks < descent < gptq < search
    assert search < nearest or (dtype == "int8" and search == nearest), "8 bits have no need to clip"


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_a_slice_keeps_every_integer(dtype):
    whole = quantize(WEIGHT, dtype, "gptq", LayerInputs(INPUTS, INPUTS))
    assert (whole.integers.min(), whole.integers.max()) == whole.grid.limits
    parts = [whole.columns(start, start + 8).dequantize() for start in range(0, 24, 8)]
    assert np.array_equal(np.concatenate(parts, axis=1), whole.dequantize())


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_a_grid_that_is_given_stays(dtype):
    """GPTQ gains on it too; a table of embeddings that is a head's matrix has such a grid."""
    sums = LayerInputs(INPUTS, INPUTS)
    covering = quantize(WEIGHT, dtype, "nearest", None)
    nearest, *fitted = (
        quantize(WEIGHT, dtype, method, sums, covering.grid) for method in ("nearest", "gptq", "descent", "blocks")
    )
    assert np.array_equal(nearest.integers, covering.integers)
    for each in fitted:
        assert np.array_equal(each.grid.steps(len(WEIGHT)), covering.grid.steps(len(WEIGHT)))
        assert output_error(each) < output_error(nearest)


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_after_descent_no_single_integer_is_better(dtype):
    sums = LayerInputs(INPUTS, INPUTS)
    found = quantize(WEIGHT, dtype, "descent", sums)
    hessian = INPUTS.T @ INPUTS + sums.damping * np.eye(len(WEIGHT), dtype=np.float32)
    (least, most), steps = found.grid.limits, found.grid.steps(len(WEIGHT))
    assert least <= found.integers.min() and found.integers.max() <= most
    slopes = hessian @ (found.dequantize() - WEIGHT)
    for move in (-1, 1):
        allowed = (found.integers + move >= least) & (found.integers + move <= most)
        gain = -2 * move * steps * slopes - np.square(steps) * np.diagonal(hessian)[:, None]
        assert np.mean(allowed & (gain > 1e-3 * np.abs(gain).mean())) < 0.002


@pytest.mark.parametrize("dtype", [name for name, each in WEIGHT_TYPES.items() if each.block])
def test_scales_of_blocks_are_learned_with_their_integers(dtype):
    """Where inputs go together, another scale than that for independent inputs loses less."""
    sums = LayerInputs(INPUTS, INPUTS)
    chosen = quantize(WEIGHT, dtype, "gptq", sums)
    kept, learned = (quantize(WEIGHT, dtype, "blocks", sums, grid) for grid in (chosen.grid, None))
    assert output_error(learned) < 0.99 * output_error(kept)
    moved = learned.grid.block_scales.astype(int) - chosen.grid.block_scales
    assert np.array_equal(learned.grid.scales, chosen.grid.scales)
    assert np.mean(moved != 0) > 0.02 and np.abs(moved).max() <= 3, "three rounds of one step each"
    assert learned.grid.block_scales.min() >= 1 and learned.grid.block_scales.max() <= 15


def test_gptq_makes_up_for_inputs_that_have_drifted():
    drifted = INPUTS * np.float32(0.9)
    ignorant = quantize(WEIGHT, "int8", "gptq", LayerInputs(drifted, drifted))
    aware = quantize(WEIGHT, "int8", "gptq", LayerInputs(INPUTS, drifted))
    assert output_error(aware, inputs=drifted) < 0.1 * output_error(ignorant, inputs=drifted)


def test_a_matrix_beside_the_identity_makes_up_for_the_same():
    """As the one in front of the head, of which only what differs from the identity is rounded."""
    drifted, identity = INPUTS * np.float32(0.9), np.eye(256, dtype=np.float32)
    whole, inputs = LayerInputs(INPUTS, drifted).making_up(MIXED + identity)
    turn = quantize(whole - identity, "int8", "gptq", inputs).dequantize()
    wanted = INPUTS @ (MIXED + identity)
    errors = [np.square(drifted @ (each + identity) - wanted).mean() for each in (turn, MIXED)]
    assert errors[0] < 0.1 * errors[1]
    same, _ = LayerInputs(INPUTS, INPUTS).making_up(MIXED)
    assert np.array_equal(same, MIXED)


def test_gptq_ignores_what_hardly_drifted():
    drifted = INPUTS * np.float32(0.98)
    ignorant = quantize(WEIGHT, "int8", "gptq", LayerInputs(drifted, drifted))
    assert np.array_equal(quantize(WEIGHT, "int8", "gptq", LayerInputs(INPUTS, drifted)).integers, ignorant.integers)


def test_the_scales_of_blocks_are_1_to_15_times_their_channels():
    grid = quantize(WEIGHT, "lpbq64", "nearest", None).grid
    assert grid.block_scales.shape == (4, 24)
    assert grid.block_scales.min() >= 1 and (grid.block_scales.max(axis=0) == 15).all()


def test_a_grid_has_scales_of_blocks_if_its_type_has_blocks():
    scales, blocks = np.ones(24, np.float32), np.ones((4, 24), np.uint8)
    assert Grid("lpbq64", scales, blocks).steps(256).shape == Grid("int4", scales).steps(256).shape == (256, 24)
    with pytest.raises(ValueError, match="block_scales: expected none with int4"):
        Grid("int4", scales, blocks)
    with pytest.raises(ValueError, match="block_scales: expected some with lpbq64"):
        Grid("lpbq64", scales)


def test_a_channel_of_zeros_stays_zero():
    weight = WEIGHT.copy()
    weight[:, 3] = 0
    for dtype in WEIGHT_TYPES:
        assert not quantize(weight, dtype, "gptq", LayerInputs(INPUTS, INPUTS)).integers[:, 3].any()


@given(st.lists(st.integers(-8, 7)))
def test_packed_integers_return_low_half_first(values):
    packed = pack_int4(np.array(values, np.int8))
    halves = [half for byte in packed.tolist() for half in (byte & 15, byte >> 4)]
    assert [half - 16 * (half > 7) for half in halves[: len(values)]] == values
    assert len(packed) == -(-len(values) // 2)
    assert not len(values) % 2 or packed[-1] >> 4 == 0
    assert unpack_int4(packed)[: len(values)].tolist() == values


@pytest.mark.parametrize("size", [5, 256, 600])
def test_the_factor_solves(size):
    rows = RANDOM.standard_normal((2 * size, size)).astype(np.float32)
    matrix = rows.T @ rows
    right = RANDOM.standard_normal((size, 3)).astype(np.float32)
    upper = cholesky(matrix.copy())
    assert np.array_equal(upper, np.triu(upper))
    np.testing.assert_allclose(upper @ upper.T, matrix, atol=1e-3 * size)
    np.testing.assert_allclose(matrix @ solve(upper, corner_inverses(upper), right.copy()), right, atol=1e-2)


def test_blocks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiple of 128"):
        quantize(WEIGHT[:96], "lpbq128", "nearest", None)


def test_the_table_of_weight_types_agrees_with_recipes_and_engines():
    """A new type is one row, and its name in `WeightDtype`, which msgspec reads recipes by."""
    assert set(WEIGHT_TYPES) == set(get_args(WeightDtype))
    for name, weights in WEIGHT_TYPES.items():
        assert find_recipe(weights.recipe).rule("model.layers.0.mlp.up_proj.weight").dtype == name
        assert weights.engines <= set(find_engines())


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_the_table_gives_the_bytes_that_are_stored(dtype):
    weight = quantize(WEIGHT, dtype, "nearest", None)
    integers = pack_int4(weight.integers) if weight.grid.type.is_packed else weight.integers
    blocks = 0 if weight.grid.block_scales is None else weight.grid.block_scales.nbytes
    assert WEIGHT_TYPES[dtype].matrix_bytes(*WEIGHT.shape) == integers.nbytes + weight.scales.nbytes + blocks
    packed = integers.nbytes if weight.grid.type.is_packed else 0
    assert WEIGHT_TYPES[dtype].packed_bytes(*WEIGHT.shape) == packed


def test_8_bits_are_symmetric_and_4_bits_use_every_level():
    assert {(each.bits, each.limits) for each in WEIGHT_TYPES.values()} == {(8, (-127, 127)), (4, (-8, 7))}


def test_inputs_are_ordered_from_the_max_important_one():
    inputs = LayerInputs(INPUTS, INPUTS)
    assert (np.diff(inputs.importance[inputs.order]) <= 0).all()


def test_clipping_counts_inputs_that_never_occur_a_little():
    """The grid has the least error of all that clip as much or less, weighted by the damped energy of each input."""
    inputs = INPUTS.copy()
    inputs[:, ::2] = 0
    sums = LayerInputs(inputs, inputs)
    weights = (sums.importance + sums.damping)[:, None]

    def error(scales: np.ndarray) -> np.ndarray:
        return (weights * np.square(WEIGHT - np.clip(np.rint(WEIGHT / scales), -8, 7) * scales)).sum(axis=0)

    found, covering = (quantize(WEIGHT, "int4", *how).scales for how in (("gptq", sums), ("nearest", None)))
    for clip in np.linspace(1, 0.6, 21, dtype=np.float32):
        assert (error(found) <= 1.001 * error(covering * clip)).all()


def test_errors_between_steps_are_interpolated():
    """Above those that were tried they grow with the square of the step; below, nothing is known."""
    random = np.random.default_rng(8)
    errors = random.uniform(1, 2, (len(_STEPS), 2, 50)).astype(np.float32)
    steps = random.uniform(0.5, 1.4, (2, 50)).astype(np.float32)
    for at in np.ndindex(steps.shape):
        found, step, of_steps = _between(errors, steps)[at], steps[at], errors[(slice(None), *at)]
        wanted = np.interp(step, _STEPS, of_steps) * max(step / _STEPS[-1], 1) ** 2
        assert found == (np.inf if step < _STEPS[0] else pytest.approx(wanted, rel=1e-3))


@pytest.mark.parametrize("dtype", ["lpbq32", "lpbq64"])
def test_block_scales_are_nearly_the_best_of_all_15(dtype):
    """For the scale of their channel, of blocks that differ by far: few of them lose more than a tenth."""
    block = WEIGHT_TYPES[dtype].block
    random = np.random.default_rng(7)
    spread = np.repeat(np.exp(random.normal(0, 1, (256 // block, 24))), block, axis=0)
    weight = (random.standard_normal((256, 24)) * spread).astype(np.float32)
    importance = random.uniform(0.1, 2, 256).astype(np.float32)

    def errors(grid: Grid) -> np.ndarray:
        steps = grid.steps(256)
        lost = weight - np.clip(np.rint(weight / steps), *grid.limits) * steps
        return (importance[:, None] * np.square(lost)).reshape(-1, block, 24).sum(axis=1)

    grid = choose_grid(weight, dtype, importance)
    every = [errors(Grid(dtype, grid.scales, np.full_like(grid.block_scales, level))) for level in range(1, 16)]
    found, best = errors(grid), np.min(every, axis=0)
    assert found.sum() <= 1.02 * best.sum() and np.mean(found > 1.1 * best) < 0.1
    assert found.sum() < 0.9 * errors(choose_grid(weight, dtype)).sum()


def test_integers_do_not_depend_on_the_threads_of_blas() -> None:
    """Also with a number of tokens that its kernels do not divide, and more inputs than one block of the factor."""
    code = (
        "import os, sys\n"
        "if hasattr(os, 'sched_setaffinity'): os.sched_setaffinity(0, range(os.cpu_count()))\n"
        "import numpy as np; from quant import LayerInputs, quantize\n"
        "random = np.random.default_rng(0)\n"
        "exact = random.standard_normal((1016, 600)).astype(np.float32)\n"
        "noise = random.standard_normal(exact.shape).astype(np.float32)\n"
        "weight = random.standard_normal((600, 512)).astype(np.float32)\n"
        "for method in ('gptq', 'descent', 'blocks'):\n"
        "    found = quantize(weight, 'int4', method, LayerInputs(exact, exact + noise / 10))\n"
        "    sys.stdout.buffer.write(found.dequantize().tobytes())\n"
    )
    made = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "OPENBLAS_NUM_THREADS": threads},
            stdout=subprocess.PIPE,
            check=True,
            timeout=120,
        ).stdout
        for threads in ("1", "2")
    ]
    assert made[0] == made[1] != b""


def test_outputs_make_up_for_what_their_sum_lacks() -> None:
    """With the missing part, the sum of both is closer to what it was than with the rounded matrix alone."""
    drifted = (INPUTS + np.random.default_rng(3).normal(0, 0.3, INPUTS.shape)).astype(np.float32)
    missing = (drifted @ np.random.default_rng(4).normal(0, 0.1, MIXED.shape)).astype(np.float32)
    wanted = INPUTS @ MIXED + missing

    def error(inputs: LayerInputs) -> float:
        found = drifted @ quantize(MIXED, "int8", "gptq", inputs).dequantize()
        return float(np.square(found - wanted).mean())

    assert error(LayerInputs(INPUTS, drifted, missing)) < 0.5 * error(LayerInputs(INPUTS, drifted))


def test_errors_of_a_head_cancel_where_its_outputs_are_alike() -> None:
    """With two columns of each head almost alike for what reads them, the weighed error falls far below descent's."""
    sums, heads, width = LayerInputs(INPUTS, INPUTS), WEIGHT.shape[1] // 4, 4
    random = np.random.default_rng(5)
    roots = random.standard_normal((heads, width, 2)).astype(np.float32)
    costs = roots @ roots.swapaxes(1, 2) + 0.05 * np.eye(width, dtype=np.float32)

    def error(found) -> float:
        missed = (INPUTS @ (found.dequantize() - WEIGHT)).reshape(len(INPUTS), heads, width)
        return float(np.einsum("thi,hij,thj->", missed, costs, missed))

    plain = quantize(WEIGHT, "int4", "descent", sums)
    weighed = quantize(WEIGHT, "int4", "attention", sums, outputs=costs)
    assert error(weighed) < 0.6 * error(plain)
    np.testing.assert_array_equal(weighed.grid.scales, plain.grid.scales)
    same = quantize(WEIGHT, "int4", "attention", sums, outputs=np.stack([np.eye(width, dtype=np.float32)] * heads))
    assert output_error(same) < 1.05 * output_error(plain)
    for method, outputs in (("attention", None), ("descent", costs)):
        with pytest.raises(ValueError, match="outputs: got"):
            quantize(WEIGHT, "int4", method, sums, outputs=outputs)  # type: ignore[arg-type]


def test_no_channel_is_far_narrower_than_the_widest_one():
    """The HTP computes noise where one is: a rotated residual of the mean 0 has a channel of nothing but rounding."""
    weight = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    weight[:, 3] *= 1e-9
    for dtype in ("int8", "int4"):
        scales = choose_grid(weight, dtype).scales
        assert scales[3] >= 0.9 * scales.max() * NARROWEST
