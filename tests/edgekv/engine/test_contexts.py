"""A bundle of several contexts against one of the largest alone: the same bits, from the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgekv
from devices import find
from edgekv.bundle import open_bundle, open_compiled
from edgekv.cli import run
from edgekv.engine.session import choose_context
from edgekv.errors import UsageError
from edgekv.qnn import provider as qnn
from exporters.export import ExportOptions
from exporters.quantize.recipe import find_recipe
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported

DEVICE = find("SM8650")
PROMPT = [(7 * i) % 200 + 3 for i in range(20)]


MADE = {"one": (48,), "three": (32, 16, 48)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("contexts") / "checkpoint")


def options_for(context: Any) -> ExportOptions:
    """With keys as rows: as columns, some strategies copy them where contexts change."""
    return export_options(context=context, ar=(1, 8), key_layout="rows")


@pytest.fixture(scope="module")
def bundles(checkpoint: Path) -> dict[str, Path]:
    return {name: exported(checkpoint, options_for(context)) for name, context in MADE.items()}


@pytest.fixture(scope="module")
def compiled(checkpoint: Path) -> dict[str, Path]:
    """The same for the HTP."""
    options = {name: options_for(context) for name, context in MADE.items()}
    return {name: exported(checkpoint, each, compiled=True) for name, each in options.items()}


def test_each_context_has_its_graphs_and_all_have_one_set_of_weights(bundles: dict[str, Path]) -> None:
    one, three = (open_bundle(bundles[name]).manifest for name in ("one", "three"))
    roles = [(graph.context, graph.ar, graph.role) for graph in three.graphs]
    steps = [(context, ar, role) for context in (16, 32, 48) for ar, role in ((1, "decode"), (8, "prefill"))]
    assert roles == [*steps, (48, 8, "score")]
    assert (three.context, three.contexts) == (48, [16, 32, 48])
    assert three.encodings == one.encodings
    assert {n: r for n, r in three.files.items() if "weights" in n} == {
        n: r for n, r in one.files.items() if "weights" in n
    }


def climbed(bundles: dict[str, Path], engine: str, strategy: str) -> dict[str, NDArray[np.int64]]:
    """Integer logits `[48 - 20 + 1, V]` of a prompt and of single tokens, up to the end of the largest context."""
    logits = {}
    for name, folder in bundles.items():
        model = edgekv.load(folder, engine, kv_update=strategy)
        rows = [model.session.feed(PROMPT).copy()]
        rows += [model.session.feed([(11 * t) % 200]).copy() for t in range(48 - len(PROMPT))]
        logits[name] = np.stack(rows).astype(int)
        copied = model.cache.stats.bytes_copied
        assert copied == (0 if strategy == "pointer-shift" else 48 * 2 * 2 * 2 * 16)
        assert len({graph.record.context for graph in model.engine.graphs.loaded}) == (1 if name == "one" else 3)
    assert logits["one"].std() > 1000
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["slot", "pointer-shift"])
def test_the_contexts_are_climbed_without_a_difference(bundles: dict[str, Path], strategy: str) -> None:
    """On the CPU a longer row of attention weights may be summed in another order."""
    logits = climbed(bundles, "cpu", strategy)
    assert np.abs(logits["one"] - logits["three"]).max() <= 64


@pytest.mark.thorough
@pytest.mark.htp
def test_the_contexts_are_climbed_bit_by_bit_on_the_htp(compiled: dict[str, Path]) -> None:
    logits = climbed(compiled, "htp", "pointer-shift")
    assert np.array_equal(logits["one"], logits["three"])


def grown(bundle: Path, engine: str, strategy: str) -> None:
    """The memory moves under sessions that are bound to it; the same bits, as the graphs are the same."""
    logits = {}
    for growth in (None, "staggered", "together"):
        model = edgekv.load(bundle, engine, kv_update=strategy, kv_growth=growth)
        rows = [model.session.feed(PROMPT[:9]).copy()]
        rows += [model.session.feed([(11 * t) % 200]).copy() for t in range(48 - 9)]
        logits[growth] = np.stack(rows)
        # The prompt of 9 makes the first of two layers grow before it has a row to copy; 16 and 32 lie behind.
        assert model.cache.stats.reallocations == (0 if growth is None else 4)
    assert np.array_equal(logits[None], logits["staggered"])
    assert np.array_equal(logits[None], logits["together"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["slot", "pointer-shift"])
def test_a_cache_that_grows_gives_the_same_bits(bundles: dict[str, Path], strategy: str) -> None:
    grown(bundles["three"], "cpu", strategy)


@pytest.mark.thorough
@pytest.mark.htp
def test_a_cache_that_grows_gives_the_same_bits_on_the_htp(compiled: dict[str, Path]) -> None:
    grown(compiled["three"], "htp", "pointer-shift")


def test_layers_that_grow_apart_leave_the_others_their_windows(tmp_path: Path) -> None:
    """Two layers that attend to the whole context, then one with a window: its group has another number then."""
    sizes = ARCHITECTURES["qwen2-sliding"] | {"max_window_layers": 2}
    bundle = exported(write_checkpoint(tmp_path / "checkpoint", sizes), export_options(context=(32, 64), ar=(1, 8)))
    logits = {}
    for growth in (None, "staggered", "together"):
        model = edgekv.load(bundle, kv_growth=growth)
        logits[growth] = [model.session.feed([(11 * t) % 200]).copy() for t in range(48)]
        assert (model.cache.stats.reallocations > 0) is (growth is not None)
    assert np.array_equal(logits[None], logits["staggered"])
    assert np.array_equal(logits[None], logits["together"])


@pytest.mark.slow
def test_a_generation_reports_how_its_memory_grew(bundles: dict[str, Path]) -> None:
    stats = {}
    for growth in (None, "staggered", "together"):
        generation = edgekv.load(bundles["three"], kv_growth=growth).generate(PROMPT[:5], 40)
        tokens = [token.id for token in generation]
        stats[growth] = (tokens, generation.stats)
    assert stats[None][0] == stats["staggered"][0] == stats["together"][0]
    fixed, staggered, together = (stats[growth][1] for growth in stats)
    assert (staggered.setup.kv_growth, staggered.cache.reallocations, fixed.cache.reallocations) == ("staggered", 4, 0)
    assert fixed.cache.bytes_peak == fixed.cache.bytes_held
    assert staggered.cache.bytes_held < staggered.cache.bytes_peak < together.cache.bytes_peak


def test_the_command_lets_the_cache_grow(bundles: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(bundles["three"]), "--prompt", "a", "--max-new-tokens", "30", "--kv-growth", "staggered"]
    assert run([*command, "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)["stats"]
    assert (stats["setup"]["kv_growth"], stats["cache"]["reallocations"] > 0) == ("staggered", True)
    assert stats["cache"]["bytes_held"] < stats["cache"]["bytes_peak"]
    assert run(command) == 0
    assert f"({stats['cache']['bytes_peak']:,} at most)" in capsys.readouterr().err


def test_growth_goes_with_what_can_grow(bundles: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="growth: got one context, of 48 tokens; expected several"):
        edgekv.load(bundles["one"], kv_growth="staggered")
    with pytest.raises(UsageError, match="growth: got staggered with adaptive"):
        edgekv.load(bundles["three"], kv_growth="staggered", cache_mode="adaptive(1MiB)")
    with pytest.raises(UsageError, match="growth: got together with num_beams"):
        edgekv.load(bundles["three"], kv_growth="together").generate(PROMPT, 4, num_beams=2)


def test_a_new_text_begins_in_the_min_context(bundles: dict[str, Path]) -> None:
    model = edgekv.load(bundles["three"], policy="sinks(4, 20)")
    first = [token.id for token in model.generate(PROMPT, 60, ignore_eos=True)]
    model.engine.graphs._loaded.clear()
    assert [token.id for token in model.generate(PROMPT[:5], 4)] and len(first) > 28
    assert [*model.engine.graphs._loaded] == ["ar1_cl16", "ar8_cl16"]


def test_scoring_and_beams_use_the_largest_context(bundles: dict[str, Path]) -> None:
    one, three = (edgekv.load(bundles[name]) for name in ("one", "three"))
    tokens = PROMPT * 2
    assert np.abs(one.score(tokens) - three.score(tokens)).max() < 1e-2 * np.abs(one.score(tokens)).max()
    best = [model.generate(PROMPT, 8, num_beams=3).sequences[0].tokens for model in (one, three)]
    assert best[0] == best[1]


def test_a_kept_sequence_goes_on_across_contexts(bundles: dict[str, Path]) -> None:
    model = edgekv.load(bundles["three"])
    turns = [PROMPT[:10], PROMPT + PROMPT[:9]]
    kept = [[t.id for t in model.generate(turn, 4, sequence=1)] for turn in turns]
    assert kept == [[t.id for t in model.generate(turn, 4)] for turn in turns]


@pytest.mark.thorough
@pytest.mark.htp
def test_one_binary_holds_all_graphs(compiled: dict[str, Path]) -> None:
    found = open_compiled(open_bundle(compiled["three"]), "SM8650", qnn.compiler())
    assert found is not None
    record = found.manifest
    shared = record.binaries[-1]
    assert [*shared.wrappers] == [f"ar{ar}_cl{context}" for context in (16, 32, 48) for ar in (1, 8)]
    alone = sum(record.files[binary.file].bytes for binary in record.binaries[:-1])
    assert shared.graphs == 6 and record.files[shared.file].bytes < alone / 2


def test_the_min_context_that_has_room_is_chosen() -> None:
    assert [choose_context(columns, [16, 32]) for columns in (1, 16, 17, 32, 33)] == [16, 16, 32, 32, 32]


@pytest.mark.parametrize("context", [(16, 30), (8, 16), ()])
def test_a_context_that_no_graph_can_have_is_refused(context: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="--context"):
        ExportOptions(DEVICE, find_recipe("w8a16"), context, ar=(1, 8))


def test_a_prompt_loads_the_graphs_that_it_runs(tmp_path: Path) -> None:
    model = edgekv.load(exported(write_checkpoint(tmp_path), export_options(context=48, ar=(1, 8, 24))))
    loaded = []
    for count in (1, 5, 17):
        [*model.generate(PROMPT[:count], 2)]
        loaded.append([graph.ar for graph in model.engine.graphs.loaded])
    assert loaded == [[1], [1, 8], [1, 8, 24]]


def test_scoring_loads_the_graphs_that_it_runs(tmp_path: Path) -> None:
    bundle = exported(write_checkpoint(tmp_path), export_options(context=48, ar=(1, 8, 24)))
    for tokens, roles in ((24, ["score"]), (25, ["score", "decode"])):
        with edgekv.load(bundle) as model:
            model.score([*range(5, 5 + tokens)])
            assert [graph.record.role for graph in model.engine.graphs.loaded] == roles


def test_a_pass_of_drafts_fits_the_rest_of_the_context(tmp_path: Path) -> None:
    options = export_options(context=(32, 64), ar=(1, 8), draft_rows=(3, 8))
    room = []
    with edgekv.load(exported(write_checkpoint(tmp_path / "checkpoint"), options), threads=1) as model:
        for _ in range(64):
            room.append(model.session.draft_room)
            model.session.feed([5])
    assert room == [8] * 57 + [3] * 5 + [0] * 2


def test_an_engine_whose_rows_depend_on_others_runs_no_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = export_options(context=(32, 64), ar=(1, 8), draft_rows=(3, 8))
    with edgekv.load(exported(write_checkpoint(tmp_path / "checkpoint"), options), threads=1) as model:
        assert model.session.draft_room == 8
        monkeypatch.setattr(model.engine.graphs, "batch_invariance", "unequal")
        assert model.session.draft_room == 0
