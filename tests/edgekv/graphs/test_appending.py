"""Decode steps on the CPU append to the cache in its own memory, in one node for all attention of a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgekv
from edgekv.bundle import open_bundle
from edgekv.graphs.build import rendered
from edgekv.graphs.cpu_mode import RenderedMode
from edgekv.graphs.source import PartSource, can_append, signed_cache
from edgekv.graphs.weight_file import WeightFile
from edgekv.kv import STRATEGIES
from edgekv.runtime import CpuEngine
from exporters.lora.options import LoraOptions
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported

PROMPT = [*range(5, 34)]
NEW = 12


def _run(folder: Path, prompt: list[int] = PROMPT, new: int = NEW, **options: Any) -> tuple[list[int], Any, set[str]]:
    """The tokens, their logits `[new, V]`, and the names of the graphs that ran."""
    with edgekv.load(folder, **{"cpu_mode": "exact16", "threads": 1, **options}) as model:
        found = [*model.generate(prompt, new, ignore_eos=True, return_logits=True)]
        names = {graph.record.name for graph in model.session._graphs.loaded}
        return [token.id for token in found], np.stack([np.asarray(token.logits, float) for token in found]), names


def _min_db(expected: Any, found: Any) -> float:
    noise = np.square(found - expected).mean(axis=1)
    return float((10 * np.log10(expected.var(axis=1) / np.maximum(noise, 1e-9))).min())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_decodes_alike(small: Path, strategy: Any) -> None:
    """The baseline moves all rows in every step, so that no row is free: its graph is the one without appending."""
    tokens, logits, names = _run(small, kv_update=strategy)
    plain, expected, _ = _run(small, kv_update="shift-concat")
    assert ("ar1_cl64_appending" in names) == (strategy != "shift-concat")
    assert tokens == plain and _min_db(expected, logits) > 40


@pytest.mark.parametrize("policy", ["sliding-window", "sinks(4, 40)", "keydiff(40)"])
@pytest.mark.parametrize("strategy", ["slot", "pointer-shift"])
def test_tokens_leave_as_elsewhere(small: Path, policy: str, strategy: Any) -> None:
    """Past a full context: new rows take the place of old ones."""
    tokens, _, names = _run(small, new=80, policy=policy, kv_update=strategy)
    plain, _, others = _run(small, new=80, policy=policy, kv_update="shift-concat")
    assert "ar1_cl64_appending" in names and "ar1_cl64" in others
    assert tokens == plain


def test_a_first_token_alone_and_a_full_context(small: Path) -> None:
    tokens, logits, names = _run(small, [7], 63)
    plain, expected, _ = _run(small, [7], 63, kv_update="shift-concat")
    assert names == {"ar1_cl64_appending"} and tokens == plain and _min_db(expected, logits) > 40


def test_a_rewound_text_has_the_bits_of_a_new_one(small: Path) -> None:
    with edgekv.load(small, cpu_mode="fast", threads=1) as model:
        session = model.session
        for token in range(40, 60):
            last = session.feed([token]).copy()
        assert session.reuse([*range(40, 48), 7]) == 8
        for token in range(48, 60):
            again = session.feed([token]).copy()
        assert np.array_equal(last, again)


def test_beams_whose_rows_stand_side_by_side_do_not_append(small: Path) -> None:
    found = []
    for strategy in ("slot", "shift-concat"):
        with edgekv.load(small, cpu_mode="exact16", threads=1, kv_update=strategy) as model:
            found.append(model.generate(PROMPT, 6, num_beams=3, num_return_sequences=3).sequences)
    assert [beam.tokens for beam in found[0]] == [beam.tokens for beam in found[1]]
    assert [beam.score for beam in found[0]] == pytest.approx([beam.score for beam in found[1]], abs=0.01)


@pytest.mark.parametrize("growth", [None, "staggered"])
def test_memory_that_grows_is_appended_to(tmp_path: Path, growth: str | None) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["smollm2"])
    folder = exported(checkpoint, export_options(context=(32, 128), ar=(1, 8)))
    tokens, _, names = _run(folder, new=80, kv_growth=growth)
    assert tokens == _run(folder, new=80, kv_update="shift-concat")[0]
    assert {"ar1_cl32_appending", "ar1_cl128_appending"} <= names


@pytest.mark.parametrize(
    ("architecture", "recipe", "options"),
    [
        ("smollm2", "w4a16", {}),  # one key head, of 16 elements
        pytest.param("qwen2", "w8a16", {}, marks=pytest.mark.slow),  # biases
        pytest.param("qwen3", "w4a16", {"key_layout": "columns"}, marks=pytest.mark.slow),  # norms of heads
        pytest.param("phi4-mini", "w4a16", {}, marks=pytest.mark.slow),  # heads that turn in part
        pytest.param("mistral-0.3", "w8a16", {}, marks=pytest.mark.slow),  # rows of 24 bytes
        pytest.param("llama-2", "w8a16", {"splits": 2, "head": "own"}, marks=pytest.mark.slow),
        pytest.param("olmo2", "w4a16", {}, marks=pytest.mark.slow),  # norms of all heads
        pytest.param("smollm2", "w8a16", {"lora": LoraOptions(4)}, marks=pytest.mark.slow),
    ],
)
def test_any_architecture(tmp_path: Path, architecture: str, recipe: str, options: Any) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[architecture])
    folder = exported(checkpoint, export_options(recipe, **{"context": 64, "ar": (1, 8), **options}))
    tokens, logits, names = _run(folder)
    plain, expected, _ = _run(folder, kv_update="shift-concat")
    assert any("appending" in name for name in names)
    assert tokens == plain and _min_db(expected, logits) > 40


def _scale_types(folder: Path, mode: RenderedMode, scratch: Path) -> set[bytes]:
    """How the nodes of attention of a decode step take the scales of keys."""
    engine = CpuEngine(1, mode)
    manifest = engine.as_run(open_bundle(folder).manifest)
    (graph,) = engine.appending_decode(manifest)
    with (scratch / "weights").open("wb") as file:
        source = PartSource.of(folder, manifest, graph.parts[0].file, (), [graph])
        model = rendered(source, mode, WeightFile(file, "weights"))
    nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    return {field.s for node in nodes for field in node.attribute if field.name == "k_quant_type"}


@pytest.mark.parametrize(
    ("architecture", "fields", "recipe"),
    [
        ("smollm2", {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}, "w8a16"),
        ("qwen2", {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64}, "w4a16-lpbq64"),  # biases
    ],
)
def test_matrices_with_the_scales_of_the_cache(tmp_path: Path, architecture: str, fields: Any, recipe: str) -> None:
    """In `fast` the node multiplies the integers alone, although heads have several scales: as exact as without."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[architecture] | fields)
    folder = exported(checkpoint, export_options(recipe, context=64, ar=(1, 8)))
    manifest = open_bundle(folder).manifest
    assert len({manifest.encodings[tensor.past].scale for tensor in manifest.cache_geometry.names()}) > 4
    assert _scale_types(folder, "fast", tmp_path) == {b"PER_TENSOR"}
    assert _scale_types(folder, "exact16", tmp_path) == {b"PER_CHANNEL"}
    logits = []
    for options in ({"cpu_mode": "exact16"}, {}, {"kv_update": "shift-concat"}):
        with edgekv.load(folder, **{"cpu_mode": "fast", "threads": 1, **options}) as model:
            logits.append(np.stack([model.session.feed([token]).copy() for token in PROMPT]).astype(float))
    appended_db, plain_db = (_min_db(logits[0], found) for found in logits[1:])
    assert appended_db > plain_db - 2 and plain_db > 10


def test_keys_and_values_are_those_of_the_bundle_less_128(small: Path) -> None:
    manifest = open_bundle(small).manifest
    signed = signed_cache(manifest)
    names = [tensor.past for tensor in manifest.cache_geometry.names()]
    assert signed.kv_dtype == "s8" and CpuEngine(1, "fast").as_run(manifest).kv_dtype == "s8"
    assert {signed.encodings[name].zero_point for name in names} == {0}
    assert [signed.encodings[name].scale for name in names] == [manifest.encodings[name].scale for name in names]
    assert CpuEngine(1).as_run(manifest).kv_dtype == "u8"


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("smollm2", {"draft_rows": (4,)}),  # drafts: a token has the same bits in every graph
        ("gemma3", {}),  # windows
        ("smollm2", {"kv_dtype": "s16"}),
    ],
)
def test_elsewhere_the_graphs_do_not_append(tmp_path: Path, architecture: str, options: Any) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[architecture])
    folder = exported(checkpoint, export_options(**{"context": 64, "ar": (1, 8), **options}))
    assert not can_append(open_bundle(folder).manifest)
    assert not any("appending" in name for name in _run(folder)[2])
