"""Transforms of heads that recipes fold into the weights: the same logits, and keys that one scale fits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgekv.bundle import RecipeRecord, open_bundle
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.fold import EVERY, Rows
from exporters.checkpoint.folded import transformed
from exporters.checkpoint.rotate import applied_rotation
from exporters.checkpoint.tensors import Tensors
from exporters.inspect import trace_reference
from exporters.quantize.recipe import Recipe, WeightRule, describe_recipe
from exporters.quantize.reference import Floats, Reference
from quant import Encoding
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported

TOKENS = [(37 * i * i + 5 * i) % 250 for i in range(40)]
BOTH = RecipeRecord(name="both", rotation="none", weights=[], value_rotation="hadamard", key_scaling="pairs")


def changed(one: Floats, other: Floats) -> float:
    """The greatest difference, relative to the range."""
    return float(np.abs(one - other).max() / np.ptp(one))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_heads_are_transformed_and_logits_stay(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[name])))
    turned = RecipeRecord(
        name="all",
        rotation=applied_rotation(checkpoint.spec, "hadamard"),
        weights=[],
        value_rotation="hadamard",
        key_scaling="pairs",
    )
    exact, folded = (trace_reference(each, TOKENS) for each in (checkpoint, transformed(checkpoint, turned)))
    assert changed(exact["logits"], folded["logits"]) < 1e-4
    keys = next(name for name in exact if name.startswith("past_key_"))  # not every layer has some
    spec = checkpoint.spec
    has_weights = spec.norm_weights and spec.qk_norm_weights  # factors go into those of a norm
    changes = {
        keys: spec.qk_norm is None or has_weights,
        keys.replace("key", "value"): not spec.output_gates,  # a gate for every channel keeps them from being rotated
    }
    for cached, is_changed in changes.items():
        assert (changed(exact[cached], folded[cached]) > 0.01) == is_changed


class Uneven:
    """A checkpoint some of whose pairs of keys reach 20 times as far as they did, and their queries as little."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.spec = checkpoint.spec

    def tensor(self, key: str, rows: Rows = EVERY) -> Floats:
        stored = self._checkpoint.tensor(key)
        factor = {"k": 20.0, "q": 0.05}.get(key.split("self_attn.")[-1][0]) if "self_attn" in key else None
        which = "_norm" if self.spec.qk_norm else "_proj"
        if factor is not None and which in key:
            heads = stored.reshape(-1, self.spec.head_dim, *stored.shape[1:])
            heads[:, [1, 1 + self.spec.rope.width // 2]] *= np.float32(factor)
        return stored[rows]


def score_error(tensors: Tensors) -> float:
    """What keys of 8 bits under one scale do to the scores of a head, relative to the scores."""
    trace = trace_reference(tensors, TOKENS)
    keys = trace["past_key_0_h0_in"]
    query = next(v for n, v in reversed(trace.items()) if n.startswith("layers.0.q.h0") and v.shape == keys.shape)
    encoding = Encoding.symmetric(float(np.abs(keys).max()), "u8")
    error = encoding.dequantize(encoding.quantize(keys)) - keys
    return float(np.square(query @ error.T).mean() / np.square(query @ keys.T).mean())


@pytest.mark.parametrize("name", ["llama-2", "llama-biased", "qwen2", "qwen3", "phi4-mini"])
def test_scaled_keys_fit_one_scale(tmp_path: Path, name: str) -> None:
    uneven = Uneven(Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[name]))))
    assert score_error(transformed(uneven, BOTH)) < 0.1 * score_error(uneven)


def test_a_pair_of_zeros_is_left_in_place(tmp_path: Path) -> None:
    class Empty(Uneven):
        def tensor(self, key: str, rows: Rows = EVERY) -> Floats:
            stored = self._checkpoint.tensor(key)
            if "k_proj" in key:
                stored.reshape(-1, self.spec.head_dim, self.spec.hidden)[:, [1, 1 + self.spec.rope.width // 2]] = 0
            return stored[rows]

    empty = Empty(Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint"))))
    exact, folded = (next(Reference(each).logits([TOKENS])) for each in (empty, transformed(empty, BOTH)))
    assert changed(exact, folded) < 1e-4


def test_a_recipe_that_transforms_heads_says_so(tmp_path: Path) -> None:
    rule = WeightRule(tensors="*", dtype="int8", method="nearest")
    recipe = Recipe(
        name="mine",
        weights=(rule,),
        activations="u16",
        rotation="none",
        value_rotation="hadamard",
        key_scaling="pairs",
        outlier_channels="keep",
    )
    bundle = exported(write_checkpoint(tmp_path / "checkpoint"), export_options(recipe, context=64, ar=(1, 8)))
    record = open_bundle(bundle).manifest.recipe
    assert Recipe.of(record) == recipe
    assert {"rotation of each head's values: hadamard", "scaling of keys: pairs"} <= set(describe_recipe(record))
