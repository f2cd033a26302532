"""Layers that attend to the newest tokens alone: graphs, masks and cache against the float reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import edgekv
from devices import find
from edgekv.bundle import open_bundle
from edgekv.errors import UsageError
from edgekv.kv import STRATEGIES
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.inspect.evaluate import open_source
from exporters.quantize.recipe import find_recipe
from exporters.quantize.reference import Reference
from tests.checkpoints import write_checkpoint
from tests.endless import endless
from tests.exports import export_options, exported
from tests.thorough import variants

TOKENS = [(37 * i * i + 5 * i) % 250 for i in range(64)]
LIMITS = {"whole": (), "mixed": (12, 64), "narrow": (12,), "wide": (50, 40)}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two layers and contexts of 32 and 64 tokens; windows of 40 and 50 are cut by some graphs and not by others."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("windows") / "checkpoint")
    fixed = {"context": (32, 64), "ar": (1, 8), "kv_dtype": "s16"}
    return {
        name: exported(checkpoint, export_options(**fixed, max_attention_window=windows))
        for name, windows in LIMITS.items()
    }


def sqnr_db(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(10 * np.log10(np.square(wanted).sum() / np.square(found - wanted).sum()))


def reference(checkpoint: Checkpoint, windows: Sequence[int | None]) -> np.ndarray:
    (logits,) = Reference(checkpoint.limited(windows)).logits([np.array(TOKENS)])
    return logits


@pytest.mark.parametrize("name", LIMITS)
def test_logits_are_those_of_a_reference_with_the_same_windows(bundles: dict[str, Path], name: str) -> None:
    """And no others: a window of one token more or less, or none, is further away."""
    manifest = open_bundle(bundles[name]).manifest
    source = open_source(manifest, None)
    wanted = reference(source, manifest.windows)
    model = edgekv.load(bundles[name])
    found = [model.score(TOKENS)]
    model.cache.reset()
    single = np.stack([model.session.feed([token]).copy() for token in TOKENS])
    found.append(manifest.encodings["logits"].dequantize(single))
    for each in found:
        near = sqnr_db(each, wanted)
        assert near > 16
        for further in (-1, 1) if manifest.windows else ():
            others = [window and window + further for window in manifest.windows]
            assert sqnr_db(each, reference(source, others)) < near - 0.5
        if manifest.windows:
            assert sqnr_db(each, reference(source, ())) < near - 5


@pytest.mark.htp
@pytest.mark.parametrize("name", variants(["mixed", "wide"], ["mixed"]))
def test_chunks_and_single_tokens_agree_bit_by_bit_on_the_htp(bundles: dict[str, Path], name: str) -> None:
    model = edgekv.load(bundles[name], "htp", kv_update="pointer-shift")
    last = []
    for chunks in ([*[8] * 5, 1, 1], [1] * 42, [3, 8, 8, 1, 8, 8, 6]):
        model.cache.reset()
        start = 0
        for chunk in chunks:
            logits = model.session.feed(TOKENS[start : start + chunk]).copy()
            start += chunk
        last.append(logits)
        assert start == 42
    assert np.array_equal(last[0], last[1]) and np.array_equal(last[0], last[2])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), [("mixed", "fail"), ("narrow", "sliding-window"), ("wide", "fail")])
def test_every_strategy_generates_the_same(bundles: dict[str, Path], name: str, policy: str) -> None:
    texts = set()
    for strategy in STRATEGIES:
        model = edgekv.load(endless(bundles[name]), kv_update=strategy, policy=policy)
        texts.add(tuple(token.id for token in model.generate(TOKENS[:20], 70)))
    (text,) = texts
    assert len(text) == (45 if policy == "fail" else 70)


def test_a_kept_sequence_is_what_a_new_one_would_be(bundles: dict[str, Path]) -> None:
    """A turn that takes tokens back which have left a window computes the text anew."""
    model = edgekv.load(bundles["mixed"])
    for turn in (TOKENS[:20], TOKENS[:18] + TOKENS[30:34]):
        kept = model.generate(turn, 4, sequence=7)
        assert [t.id for t in kept] == [t.id for t in model.generate(turn, 4)]
    assert kept.stats.cache.reused_tokens == 0


def test_narrow_layers_hold_less(bundles: dict[str, Path]) -> None:
    held = {name: edgekv.load(folder).cache.stats.bytes_held for name, folder in bundles.items()}
    assert held["narrow"] < held["mixed"] < held["wide"] < held["whole"]
    assert held["narrow"] < held["whole"] / 3


def test_one_mask_for_each_window(bundles: dict[str, Path]) -> None:
    manifest = open_bundle(bundles["mixed"]).manifest
    assert manifest.windows == (12, None)
    assert open_bundle(bundles["whole"]).manifest.windows == ()
    model = edgekv.load(bundles["mixed"])
    model.generate(TOKENS[:3], 1)
    (graph,) = (graph for graph in model.engine.graphs.loaded if graph.ar == 8)
    shapes = {name: array.shape for name, array in graph._inputs.arrays.items() if "mask" in name}
    assert shapes == {"attention_mask_w12": (1, 1, 8, 19), "attention_mask": (1, 1, 8, 32)}


def test_what_cannot_be_is_refused(bundles: dict[str, Path], tmp_path: Path) -> None:
    manifest = open_bundle(bundles["mixed"]).manifest
    options = ExportOptions(
        find("SM8650"), find_recipe("w8a16"), 64, (1, 8), max_attention_window=(8,), check_on_htp=False
    )
    with pytest.raises(UsageError, match="--max-attention-window: got 8; expected more than the largest AR, 8"):
        export_bundle(Checkpoint.open(manifest.source.checkpoint), tmp_path / "bundle", options)
    with pytest.raises(UsageError, match="num_beams: got layers with an attention window"):
        edgekv.load(bundles["mixed"]).generate(TOKENS[:3], 1, num_beams=2)
