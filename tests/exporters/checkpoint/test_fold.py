"""Folds: maps of output and input channels, of tensors, of their rows, and of matrices that are products."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgekv.bundle import RecipeRecord
from edgekv.spec import views
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.fold import Factors, Fold
from exporters.checkpoint.folded import FoldedCheckpoint
from quant import quantize_per_channel
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint

OUT, IN = 6, 8
RANDOM = np.random.default_rng(0)
MIX_OUT, MIX_IN = (RANDOM.standard_normal((size, size)).astype(np.float32) for size in (OUT, IN))
FACTORS = np.array([0.5, 2, 1, 4, 0.25, 8], np.float32)
OUT_MAPS = {"none": None, "factors": FACTORS, "mixed": lambda stored: MIX_OUT @ stored}
IN_MAPS = {"none": None, "mixed": lambda rows: rows @ MIX_IN}


@given(st.sampled_from(sorted(OUT_MAPS)), st.sampled_from(sorted(IN_MAPS)), st.slices(OUT), st.integers(0, 2**32 - 1))
def test_rows_and_products_fold_as_the_whole_matrix_does(out_map, in_map, rows, seed):
    random, fold = np.random.default_rng(seed), Fold(OUT_MAPS[out_map], IN_MAPS[in_map])
    left, right = (random.standard_normal(shape).astype(np.float32) for shape in ((OUT, 3), (3, IN)))
    matrix = left @ right
    whole = fold.read(lambda which: matrix[which].copy(), slice(None))
    np.testing.assert_allclose(fold.read(lambda which: matrix[which].copy(), rows), whole[rows], atol=1e-4, rtol=1e-4)
    change = fold.change(Factors(left, right))
    np.testing.assert_allclose(change.left @ change.right, whole, atol=1e-3, rtol=1e-3)


def test_factors_keep_the_integers_and_mixing_does_not():
    weight = quantize_per_channel(RANDOM.standard_normal((IN, OUT)).astype(np.float32))
    kept = Fold(out_map=FACTORS).integers(weight, slice(None))
    assert kept.integers is weight.integers
    np.testing.assert_array_equal(kept.scales, weight.scales * FACTORS)
    for fold in (Fold(out_map=OUT_MAPS["mixed"]), Fold(in_map=IN_MAPS["mixed"])):
        with pytest.raises(ValueError, match="got a matrix that is changed"):
            fold.integers(weight, slice(None))


@pytest.mark.parametrize("architecture", ["llama-2", "qwen3", "olmo2", "smollm2"])
def test_some_rows_of_a_transformed_tensor_are_those_of_the_whole(tmp_path, architecture):
    """Up to the last bit: BLAS may sum the rows at the edge of a product in another order."""
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path, ARCHITECTURES[architecture])))
    rotation = "none" if checkpoint.spec.post_norms else "hadamard"
    recipe = RecipeRecord("all", rotation, [], value_rotation="hadamard", key_scaling="pairs", neuron_scaling="equal")
    folded = FoldedCheckpoint(checkpoint, recipe)
    for view in views(folded.spec):
        whole = folded.tensor(view.name)
        np.testing.assert_allclose(folded.tensor(view.name, slice(3, 9)), whole[3:9], atol=1e-6 * np.abs(whole).max())
