"""Keys and values turned and scaled head by head: the same logits, and a sink on the grid of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv.bundle import HEADS_FILE, RecipeRecord
from edgekv.errors import BundleError
from edgekv.spec import KvTensor
from exporters.checkpoint.aligned import (
    ANGLES,
    HEADROOM_8BIT,
    AlignedHead,
    AlignedHeads,
    align,
    cache_encodings,
    read_heads,
    write_heads,
)
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import transformed
from exporters.checkpoint.head_range import HeadRange
from exporters.inspect.trace import Trace, trace_reference
from exporters.quantize.survey import Survey, survey
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint

TOKENS = np.array([256, *range(60, 100)])
ALIGNED = RecipeRecord(name="aligned", rotation="none", weights=[], heads="aligned")
SHAPES = ("llama-biased", "qwen2-sliding", "qwen3", "gemma3", "phi4-mini", "smollm3", "olmo2", "smollm2")


def open_one(folder: Path, architecture: str) -> Checkpoint:
    return Checkpoint.open(str(write_checkpoint(folder, ARCHITECTURES[architecture])))


def surveyed(checkpoint: Checkpoint, first: int = 1) -> Survey:
    return survey(checkpoint, TOKENS[None], len(TOKENS), first)


def cached(trace: Trace) -> dict[str, Any]:
    found = {name: values for name, values in trace.items() if name.startswith("past_")}
    assert found
    return found


@pytest.mark.parametrize("architecture", SHAPES)
def test_the_transforms_keep_the_logits(tmp_path: Path, architecture: str) -> None:
    checkpoint = open_one(tmp_path, architecture)
    found = surveyed(checkpoint)
    heads = align(checkpoint.spec, found.reach, found.rows, 127, has_sink=True)
    exact, aligned = (trace_reference(each, TOKENS) for each in (checkpoint, transformed(checkpoint, ALIGNED, heads)))
    np.testing.assert_allclose(aligned["logits"], exact["logits"], atol=2e-4 * np.abs(exact["logits"]).max())
    for name, values in cached(exact).items():
        assert np.abs(aligned[name] - values).max() > 0.01 * np.abs(values).max(), "the cache holds other numbers"


@pytest.mark.parametrize("sink", [1, 8])
@pytest.mark.parametrize("architecture", SHAPES)
def test_all_but_the_first_token_stay_within_the_range(tmp_path: Path, architecture: str, sink: int) -> None:
    checkpoint = open_one(tmp_path, architecture)
    found = surveyed(checkpoint, sink)
    heads = align(checkpoint.spec, found.reach, found.rows, 127, has_sink=True)
    encodings = cache_encodings(heads, "u8")
    for name, values in cached(trace_reference(transformed(checkpoint, ALIGNED, heads), TOKENS, first=1)).items():
        assert np.abs(values / encodings[name].scale).max() < 127


@pytest.mark.parametrize("architecture", ["llama-biased", "smollm3", "smollm2"])
def test_the_sink_lies_on_the_grid(tmp_path: Path, architecture: str) -> None:
    checkpoint = open_one(tmp_path, architecture)
    found = surveyed(checkpoint)
    heads = align(checkpoint.spec, found.reach, found.rows, 127, has_sink=True)
    encodings = cache_encodings(heads, "u8")
    exact = cached(trace_reference(transformed(checkpoint, ALIGNED, heads), TOKENS))
    on_grid: list[bool] = []
    for tensor, row in found.rows.items():
        turned = heads[tensor.layer, tensor.head].cached(tensor.kind, row)
        np.testing.assert_allclose(turned, exact[tensor.past][:1], atol=1e-4)
        steps = turned[0] / encodings[tensor.past].scale
        missed = np.abs(steps - np.rint(steps))
        if tensor.kind == "value":
            assert missed.max() < 0.01
        else:
            half = checkpoint.spec.rope.width // 2
            on_grid += [*(missed[: 2 * half].reshape(2, half).max(axis=0) < 0.01)]
    assert np.mean(on_grid) > 0.9, "all but pairs with a radius of a few steps"


def test_without_a_sink_the_range_covers_the_first_token(tmp_path: Path) -> None:
    checkpoint = open_one(tmp_path, "smollm2")
    found = surveyed(checkpoint)
    heads = align(checkpoint.spec, found.reach, found.rows, 127, has_sink=False)
    encodings = cache_encodings(heads, "u8")
    for name, values in cached(trace_reference(transformed(checkpoint, ALIGNED, heads), TOKENS)).items():
        assert np.abs(values / encodings[name].scale).max() <= 127 / HEADROOM_8BIT * 1.02


def test_a_cache_of_16_bits_has_room_for_twice_what_was_seen(tmp_path: Path) -> None:
    checkpoint = open_one(tmp_path, "smollm2")
    found = surveyed(checkpoint)
    heads = align(checkpoint.spec, found.reach, found.rows, 32767, has_sink=False)
    encodings = cache_encodings(heads, "s16")
    for name, values in cached(trace_reference(transformed(checkpoint, ALIGNED, heads), TOKENS)).items():
        assert np.abs(values / encodings[name].scale).max() <= 32767 / 2 * 1.02


def test_pairs_fill_the_range(tmp_path: Path) -> None:
    checkpoint = open_one(tmp_path, "smollm2")
    found = surveyed(checkpoint, 0)
    heads = align(checkpoint.spec, found.reach, found.rows, 127, has_sink=False)
    steps = {name: encoding.scale for name, encoding in cache_encodings(heads, "u8").items()}
    half = checkpoint.spec.head_dim // 2
    for tensor in (KvTensor(layer, "key", 0) for layer in range(checkpoint.spec.layers)):
        values = cached(trace_reference(transformed(checkpoint, ALIGNED, heads), TOKENS))[tensor.past]
        pairs = np.abs(values / steps[tensor.past]).max(axis=0).reshape(2, half).max(axis=0)
        np.testing.assert_allclose(pairs, 127 / HEADROOM_8BIT, rtol=1e-3)


def test_transforms_come_back_from_their_file(tmp_path: Path) -> None:
    checkpoint = open_one(tmp_path, "smollm2")
    found = surveyed(checkpoint)
    heads: AlignedHeads = align(checkpoint.spec, found.reach, found.rows, 127, has_sink=True)
    write_heads(heads, tmp_path)
    file = tmp_path / HEADS_FILE
    again = read_heads(file, file.stat().st_size)
    assert again.keys() == heads.keys()
    for at, head in heads.items():
        for field in AlignedHead.__slots__:
            np.testing.assert_array_equal(getattr(again[at], field), getattr(head, field))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(BundleError, match=r"heads.safetensors: got"):
        read_heads(file, file.stat().st_size)
    assert len(ANGLES) == 45


def test_the_reach_of_keys_is_their_largest_element_after_each_turn(tmp_path: Path) -> None:
    spec = Checkpoint.open(str(write_checkpoint(tmp_path))).spec
    random, half = np.random.default_rng(2), spec.head_dim // 2
    windows = [(random.standard_normal((50, spec.head_dim)) + at).astype(np.float32) for at in range(4)]
    found = HeadRange.none(spec, 0)
    for keys in windows:
        found = found.with_keys(keys)
    first, second = (np.concatenate(windows)[:, part].astype(np.float64) for part in (slice(half), slice(half, None)))
    for at, angle in enumerate(ANGLES):
        turned = np.cos(angle) * first - np.sin(angle) * second, np.sin(angle) * first + np.cos(angle) * second
        np.testing.assert_allclose(found.pairs[:, at], np.abs(turned).max(axis=(0, 1)), rtol=1e-6)
