"""Experts within a budget: the same tokens, counted hits, and pages that leave."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import edgekv
from edgekv.bundle import open_bundle
from edgekv.cli import run
from edgekv.errors import EngineError, UsageError
from edgekv.runtime import cpu
from edgekv.runtime.expert_memory import Expert, ExpertMemory, ExpertStats, PartExperts, _File
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported

PAGE = 4096
PROMPT = [*range(3, 40)]
SIZES = {"granitemoe": {"intermediate_size": 64}, "lfm2_moe": {"moe_intermediate_size": 64}}
"""A graph itself has matrices below 4 KiB."""
READ = range(15 + 2 * 3 + 19 * 2 * 3, 16 + 2 * 3 + 19 * 2 * 3 + 1)
"""Experts of two windows of prefill, which read nearly all of the first layer and of the last one the three of a row,
and of 19 steps, which read three in each of two layers."""
LAYER = 8 * 6 * PAGE
"""Experts of a layer of `granitemoe`, as prefill reads them: the least budget."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("mixture"))


def mixture(folder: Path, name: str = "granitemoe", **changes) -> Path:
    checkpoint = write_checkpoint(folder / "checkpoint", ARCHITECTURES[name] | SIZES.get(name, {}), gain=1.0)
    (folder / "text").write_text("The quick brown fox jumps over the lazy dog.")
    return exported(checkpoint, export_options(context=64, ar=(1, 16), calibration=folder / "text", **changes))


def tokens(model: edgekv.Model) -> list[int]:
    return [token.id for token in model.generate(PROMPT, max_new_tokens=20, ignore_eos=True)]


def ran(bundle: Path, mode: str = "fast", **options) -> tuple[list[int], ExpertStats | None]:
    with edgekv.load(bundle, cpu_mode=mode, **options) as model:
        return tokens(model), model.expert_stats


def resident_bytes(names: set[str]) -> int:
    """Bytes of this process's memory that are mapped from files of these names."""
    found, name = 0, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            name = line.rsplit("/", 1)[-1]
        elif line.startswith("Rss:") and name in names:
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.parametrize("mode", ["fast", "exact16"])
@pytest.mark.parametrize("name", ["granitemoe", "lfm2_moe"])
def test_tokens_are_those_of_all_experts_in_memory(tmp_path: Path, mode, name) -> None:
    """In `fast`, of the same branches: without a budget one node computes a layer's experts of a single row."""
    folder = mixture(tmp_path, name)
    plain, none = ran(folder, mode)
    whole, stats = ran(folder, mode, expert_budget="1GB")
    assert none is None and stats.held_bytes == stats.read_bytes
    within, stats = ran(folder, mode, expert_budget=LAYER)
    assert within == whole and stats.max_held_bytes <= LAYER < stats.read_bytes
    assert within == plain or mode == "fast"


def test_no_run_of_prefill_or_decode_exceeds_the_budget(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of files that are mapped are counted when a part has run, before anything leaves."""
    resident = list[int]()
    with edgekv.load(bundle, cpu_mode="fast", expert_budget=LAYER) as model:
        stats, memory = model.expert_stats, model.engine.graphs._engine.experts
        note = PartExperts.note

        def counted(part: PartExperts) -> None:
            resident.append(resident_bytes({file.path.name for file in memory._mappings}))
            note(part)

        monkeypatch.setattr(PartExperts, "note", counted)
        tokens(model)
        stats = model.expert_stats
        assert 0 < resident_bytes({file.path.name for file in memory._mappings}) <= LAYER
    assert 0 < max(resident) <= LAYER and max(resident[:4]) > LAYER // 2, "prefill reads nearly all of a layer"
    assert stats.held_bytes <= stats.max_held_bytes <= LAYER == stats.budget_bytes
    assert stats.hits + stats.misses in READ
    assert stats.hits > 0 and stats.read_bytes > sum(file.used_bytes for file in memory._mappings), "some twice"


def test_a_budget_for_all_reads_each_file_once(bundle: Path) -> None:
    with edgekv.load(bundle, cpu_mode="fast", expert_budget="1GB") as model:
        tokens(model)
        stats, memory = model.expert_stats, model.engine.graphs._engine.experts
    assert 15 < stats.misses <= 2 * 16, "steps read what down has for one row"
    assert stats.hits + stats.misses in READ
    assert stats.held_bytes == stats.read_bytes == stats.max_held_bytes
    files = {file for held in memory._held.values() for file in held}
    assert stats.read_bytes == sum(file.used_bytes for file in files)


def test_the_oldest_pass_leaves_first_and_of_one_the_last_layer() -> None:
    memory = ExpertMemory(2 * 4 * PAGE)
    files = [{Expert(layer, at): {_File(Path(f"none{layer}.{at}"), 4 * PAGE)} for at in range(4)} for layer in range(3)]
    memory._mappings = {file: [] for own in files for (file,) in own.values()}

    def run_layer(layer: int, *numbers: int) -> None:
        memory.make_room(files[layer], len(numbers))
        flags = np.zeros((1, 4), np.float32)
        flags[0, [*numbers]] = 1
        memory.read([layer], flags, files[layer])

    for layer in range(3):
        run_layer(layer, layer)
    assert {*memory._held} == {(0, 0), (2, 2)}, "what the next pass reads last has left"
    for layer in range(3):
        run_layer(layer, layer)
    assert (memory.stats.hits, memory.stats.misses) == (1, 5)
    run_layer(0, 3)
    assert {*memory._held} == {(0, 0), (0, 3)} and memory.stats.max_held_bytes == memory.stats.budget_bytes


def test_what_a_graph_may_read_has_room_before_it_runs() -> None:
    """A layer may read all of its experts: those of others leave, and its own in the form of another graph."""
    memory = ExpertMemory(4 * 4 * PAGE)
    own, others, packed = (
        {Expert(layer, at): {_File(Path(f"{name}{at}"), 4 * PAGE)} for at in range(4)}
        for layer, name in ((0, "own"), (1, "others"), (0, "packed"))
    )
    memory._mappings = {file: [] for files in (own, others, packed) for (file,) in files.values()}
    flags = np.array([[1, 1, 0, 0]], np.float32)
    memory.read([0], flags, own)
    memory.read([1], flags, others)
    memory.make_room(own, 4)
    assert {*memory._held} == {(0, 0), (0, 1)} and memory.stats.held_bytes == 2 * 4 * PAGE
    memory.make_room(packed, 1)
    assert memory.stats.held_bytes == 2 * 4 * PAGE, "one more fits"
    memory.make_room(packed, 4)
    assert memory._held == {} and memory.stats.held_bytes == 0


def test_a_graph_runs_layer_by_layer_within_a_budget(bundle: Path, tmp_path: Path) -> None:
    with edgekv.load(bundle, cpu_mode="fast", expert_budget=LAYER) as model:
        within = tokens(model)
        parts = [part for graph in model.session._graphs.loaded for part in graph.record.parts]
    assert {len(part.layers) for part in parts} == {0, 1}, "a layer at a time, and heads"
    split = mixture(tmp_path, splits=2)
    assert ran(split, expert_budget=LAYER)[0] == within == ran(split, expert_budget="1GB")[0]


def test_scores_and_drafts_are_the_same_within_a_budget(tmp_path: Path) -> None:
    folder, found = mixture(tmp_path, draft_rows=(4,)), []
    for budget in ("1GB", LAYER):
        with edgekv.load(folder, cpu_mode="fast", expert_budget=budget) as model:
            drafted = model.generate(PROMPT, max_new_tokens=20, ignore_eos=True, speculate="lookup")
            assert [token.id for token in drafted] == tokens(model)
            found.append(model.score(PROMPT))
            stats = model.expert_stats
    assert np.array_equal(*found) and stats.max_held_bytes <= LAYER


def test_a_model_larger_than_free_memory_runs_within_a_budget(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = ran(bundle, expert_budget="1GB")
    places = open_bundle(bundle).manifest.weights
    experts_bytes = sum(places.bytes(key) for key in places.matrices if ".mlp.experts." in key)
    monkeypatch.setattr(cpu, "free_memory_bytes", lambda: places.total_bytes - experts_bytes + LAYER)
    with pytest.raises(EngineError, match="memory for bundle: got "):
        ran(bundle)
    found, stats = ran(bundle, expert_budget=LAYER)
    assert found == expected and stats.max_held_bytes <= LAYER


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "granitemoe",
            {"expert_budget": 1000},
            ["1.0 kB", "at least the experts of a layer, ", "bytes", "All experts together"],
        ),
        ("granitemoe", {"expert_budget": "12 apples"}, ["'12 apples'", "4GB or 512MiB"]),
        ("granitemoe", {"expert_budget": "1MB", "cpu_mode": "emulate"}, ["emulate", "fast or exact16"]),
        ("llama-2", {"expert_budget": "1MB"}, ["a model without experts"]),
    ],
)
def test_budgets_that_cannot_be_are_refused(tmp_path: Path, name, options, words) -> None:
    folder = mixture(tmp_path, name)
    with pytest.raises(UsageError) as caught:
        edgekv.load(folder, **{"cpu_mode": "fast"} | options)
    assert [word for word in ["expert_budget", *words] if word not in str(caught.value)] == []


def test_the_command_prints_what_became_of_experts(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "hello", "--max-new-tokens", "4", "--expert-budget", "192KiB"]
    assert run(["generate", str(bundle), *options]) == 0
    plain = capsys.readouterr()
    assert re.search(r"\[experts: \d+ of \d+ were in memory, .* of 196.6 kB in memory now, ", plain.err)
    assert run(["generate", str(bundle), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["experts"]
    assert found["budget_bytes"] == 192 << 10 and found["misses"] > 0
    assert run(["generate", str(bundle), *options[:-1], "1kB"]) == 2
    assert "--expert-budget: got 1.0 kB; expected at least the experts of a layer" in capsys.readouterr().err


def test_what_a_layer_has_is_known_from_the_manifest(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    own_bytes = sum(manifest.weights.bytes(key) for key in manifest.weights.matrices if ".0.mlp.experts." in key)
    with pytest.raises(UsageError, match=f"at least the experts of a layer, {own_bytes:,} bytes"):
        ExpertMemory.of(manifest, own_bytes - 1)
    assert ExpertMemory.of(manifest, own_bytes).stats.budget_bytes == own_bytes
    with pytest.raises(UsageError, match=f"at least the experts of a layer, {LAYER:,} bytes"):
        ran(bundle, expert_budget=LAYER - 1)
