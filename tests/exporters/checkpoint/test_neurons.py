"""Neurons of the feed-forward that are scaled alike: the same logits, and a matrix that one step per channel fits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgekv.bundle import NeuronScalingName, RecipeRecord, RotationName
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.fold import EVERY, Rows
from exporters.checkpoint.folded import transformed
from exporters.checkpoint.neurons import applied_scaling
from exporters.checkpoint.rotate import applied_rotation
from exporters.checkpoint.tensors import Tensors
from exporters.inspect import trace_reference
from exporters.quantize.recipe import describe_recipe
from exporters.quantize.reference import Floats
from quant import LayerInputs, quantize, quantize_per_channel
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint

TOKENS = [(37 * i * i + 5 * i) % 250 for i in range(40)]
DOWN = "model.layers.0.mlp.down_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"


def record(rotation: RotationName = "none", scaling: NeuronScalingName = "equal") -> RecipeRecord:
    return RecipeRecord(name=scaling, rotation=rotation, weights=[], neuron_scaling=scaling)


class Uneven:
    """A checkpoint one of whose neurons writes 50 times as much as it did, and is excited as little."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.spec = checkpoint.spec

    def tensor(self, key: str, rows: Rows = EVERY) -> Floats:
        stored = self._checkpoint.tensor(key)
        if "mlp.up_proj" in key:
            stored[7] /= 50
        elif "mlp.down_proj.weight" in key:
            stored[:, 7] *= 50
        return stored[rows]


def down_error(tensors: Tensors) -> float:
    """What int8 does to the output of a `down_proj`, relative to it."""
    inner, weight = trace_reference(tensors, TOKENS)["layers.0.mlp"], tensors.tensor(DOWN).T
    error = quantize_per_channel(weight).dequantize() - weight
    return float(np.square(inner @ error).mean() / np.square(inner @ weight).mean())


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
@pytest.mark.parametrize(("scaling", "order"), [("equal", np.inf), ("norm", 2)])
def test_neurons_are_scaled_and_logits_stay(
    tmp_path: Path, name: str, scaling: NeuronScalingName, order: float
) -> None:
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path, ARCHITECTURES[name])))
    applied = applied_scaling(checkpoint.spec, scaling)
    scaled = transformed(checkpoint, record(applied_rotation(checkpoint.spec, "hadamard"), applied))
    exact, found = (trace_reference(each, TOKENS)["logits"] for each in (checkpoint, scaled))
    assert float(np.abs(exact - found).max() / np.ptp(exact)) < 1e-4
    spec = checkpoint.spec
    dense = [layer for layer in spec.own_layers if not spec.has_experts(layer)]
    assert (applied != "none") is (spec.gated and bool(dense))
    if applied == "none":
        return
    sizes = np.linalg.norm(scaled.tensor(f"model.layers.{dense[0]}.mlp.down_proj.weight"), order, axis=0)
    np.testing.assert_allclose(sizes, sizes[0], rtol=1e-5)


def test_largest_weights_of_up_rows_become_negative_which_4_bits_round_better(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path, ARCHITECTURES["llama-biased"])))
    scaled = transformed(checkpoint, record(scaling="norm"))
    assert np.mean(-scaled.tensor(UP).min(axis=1) > scaled.tensor(UP).max(axis=1)) > 0.75
    inputs = trace_reference(checkpoint, TOKENS)["layers.0.mlp_norm"]

    def error(tensors: Tensors) -> float:
        weight = tensors.tensor(UP).T
        rounded = quantize(weight, "int4", "gptq", LayerInputs(inputs, inputs)).dequantize()
        return float(np.square(inputs @ (rounded - weight)).sum() / np.square(inputs @ weight).sum())

    assert error(scaled) < error(checkpoint)


def test_uneven_neurons_fit_one_step(tmp_path: Path) -> None:
    uneven = Uneven(Checkpoint.open(str(write_checkpoint(tmp_path, ARCHITECTURES["llama-biased"]))))
    assert down_error(transformed(uneven, record())) < 0.1 * down_error(uneven)


def test_a_neuron_that_writes_nothing_stays_finite(tmp_path: Path) -> None:
    class Dead(Uneven):
        def tensor(self, key: str, rows: Rows = EVERY) -> Floats:
            stored = super().tensor(key)
            if "mlp.down_proj.weight" in key:
                stored[:, 3] = 0
            return stored[rows]

    dead = Dead(Checkpoint.open(str(write_checkpoint(tmp_path, ARCHITECTURES["qwen2"]))))
    exact, found = (trace_reference(each, TOKENS)["logits"] for each in (dead, transformed(dead, record())))
    np.testing.assert_allclose(found, exact, atol=1e-4)


def test_recipes_say_that_neurons_are_scaled() -> None:
    assert "scaling of neurons: equal" in list(describe_recipe(record()))
