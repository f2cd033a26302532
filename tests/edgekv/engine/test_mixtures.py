"""Mixtures of experts: the same tokens and the same bits, however a text was computed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import edgekv
from devices import find
from edgekv import SamplingParams
from edgekv.bundle import open_bundle
from edgekv.cli import run
from edgekv.draft import Speculation
from edgekv.kv import KVCache
from edgekv.plan import PlanOptions, make_plan
from edgekv.prefix import StoreConfig
from tests.edgekv.engine.test_states import CONTEXT, LONG, hybrid, ids, random_calls, same
from tests.support.bundles import Oracle, with_drafts
from tests.support.thorough import calls, variants

NAMES = ("granitemoe", "olmoe", "qwen3_moe")
PROMPT = [*range(40, 60), *range(40, 52)]
SHORT = SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", params=variants(NAMES, ["granitemoe"]))
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graphs of 1 and 16 rows, and such that verify 4 and 8, in contexts of 64 and 160."""
    return hybrid(tmp_path_factory.mktemp("mixture"), request.param)


@pytest.mark.parametrize("mode", ["emulate", "exact16", "fast"])
def test_drafts_of_every_kind_leave_the_text_and_the_cache_as_they_are(bundle: Path, mode: str) -> None:
    """Rows of a verify graph choose experts each by itself: in `fast` an expert that any of them has chosen runs."""
    with edgekv.load(bundle, cpu_mode=mode) as model:
        plain = ids(model.generate(PROMPT, LONG))
        expected = model.cache.state
        looked_up = model.generate(PROMPT, LONG, speculate="lookup")
        assert ids(looked_up) == plain and same(model.cache.state, expected)
        assert looked_up.stats.speculation is not None
        drafter = Oracle(PROMPT + plain, model.bundle.manifest.model.vocab, 0, 0.7)
        with with_drafts(model, PROMPT, LONG, Speculation(drafter=drafter)) as generation:
            assert ids(generation) == plain
        assert generation.stats.speculation.accepted > 5  # type: ignore[union-attr]
        assert same(model.cache.state, expected)


@pytest.mark.parametrize("strategy", ["slot", "pointer-shift", "mirror", "shift-concat"])
def test_every_strategy_gives_the_same_tokens(bundle: Path, strategy: str) -> None:
    with (
        edgekv.load(bundle, cpu_mode="emulate") as one,
        edgekv.load(bundle, cpu_mode="emulate", kv_update=strategy) as two,
    ):
        assert ids(two.generate(PROMPT, LONG)) == ids(one.generate(PROMPT, LONG))


def test_prefixes_rewinds_and_drafts_change_no_bit(bundle: Path) -> None:
    config, options = StoreConfig(tokens_per_block=16, max_bytes=1 << 22), {"cpu_mode": "emulate"}
    with edgekv.load(bundle, **options) as plain, edgekv.load(bundle, prefix_cache=config, **options) as model:
        assert random_calls(plain, model, calls(16), SHORT) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", variants(NAMES, ["qwen3_moe"]))
def test_parts_give_the_bits_of_the_whole(tmp_path: Path, name: str) -> None:
    whole, divided = (hybrid(tmp_path / str(count), name, splits=count) for count in (1, 2))
    text = [*range(40, 130)]
    with edgekv.load(whole, cpu_mode="emulate") as one, edgekv.load(divided, cpu_mode="emulate") as two:
        assert len(two.bundle.manifest.graphs[0].parts) == 3  # with the head
        assert np.array_equal(one.session.feed(text), two.session.feed(text))
        assert same(two.session.cache.state, one.session.cache.state)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_and_size_count_the_cache_of_the_bundle(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest_folder = hybrid(tmp_path, name, key_layout="columns", draft_rows=())
    manifest = open_bundle(manifest_folder).manifest
    encodings = [manifest.encodings[tensor.past] for tensor in manifest.cache_geometry.names()]
    cache = KVCache(manifest.cache_geometry, ar=(1, 16), strategy="slot", encodings=encodings)
    planned = make_plan(tmp_path / "checkpoint", find("SM8650"), PlanOptions(context=CONTEXT, ar=(1, 16)))
    assert planned.demand.cache_bytes == cache.bytes_held
    sizes = []
    for subject in (tmp_path / "checkpoint", manifest_folder):
        assert run(["size", str(subject), "--context", str(CONTEXT), "--json"]) == 0
        sizes.append(json.loads(capsys.readouterr().out))
    assert sizes[0]["geometry"] == sizes[1]["geometry"]
