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
from edgekv.errors import UsageError
from edgekv.runtime.expert_memory import Expert, ExpertMemory, ExpertStats, _File
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported

PAGE = 4096
PROMPT = [*range(3, 40)]
SIZES = {"granitemoe": {"intermediate_size": 64}, "lfm2_moe": {"moe_intermediate_size": 64}}
"""A graph itself has matrices below 4 KiB."""
READ = range(2 * 15 + 19 * 2 * 3, 2 * 16 + 19 * 2 * 3 + 1)
"""Experts of two windows of prefill, which read nearly all, and of 19 steps, which read three in each of two layers."""
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
    within, stats = ran(folder, mode, expert_budget=20 * PAGE)
    assert within == whole and stats.held_bytes < stats.read_bytes
    assert within == plain or mode == "fast"


def test_a_budget_below_what_a_token_reads_is_kept_and_still_finds_some(bundle: Path) -> None:
    budget = 4 * 4 * PAGE
    with edgekv.load(bundle, cpu_mode="fast", expert_budget=budget) as model:
        tokens(model)
        stats, memory = model.expert_stats, model.engine.graphs._engine.experts
        names = {file.path.name for file in memory._mappings}
        assert 0 < resident_bytes(names) <= budget
    assert stats.held_bytes <= budget == stats.budget_bytes
    assert stats.max_pass_bytes > budget, "prefill reads nearly all"
    assert stats.hits + stats.misses in READ
    assert stats.hits > 0 and stats.read_bytes > sum(file.used_bytes for file in memory._mappings), "some twice"


def test_a_budget_for_all_reads_each_file_once(bundle: Path) -> None:
    with edgekv.load(bundle, cpu_mode="fast", expert_budget="1GB") as model:
        tokens(model)
        stats, memory = model.expert_stats, model.engine.graphs._engine.experts
    assert 15 < stats.misses <= 2 * 16, "steps read what down has for one row"
    assert stats.hits + stats.misses in READ
    assert stats.held_bytes == stats.read_bytes == stats.max_pass_bytes
    files = {file for held in memory._held.values() for file in held}
    assert stats.read_bytes == sum(file.used_bytes for file in files)


def test_the_oldest_pass_leaves_first_and_of_one_the_last_layer(bundle: Path) -> None:
    memory = ExpertMemory(2 * 4 * PAGE)
    files = {Expert(at // 4, at % 4): {_File(Path(f"none{at}"), 4 * PAGE)} for at in range(12)}
    memory._mappings = {file: [] for (file,) in files.values()}
    flags = np.zeros((3, 4), np.float32)
    flags[[0, 1, 2], [0, 1, 2]] = 1
    memory.read(range(3), flags, files)
    assert {*memory._held} == {(0, 0), (1, 1)}
    memory.read(range(3), flags, files)
    assert (memory.stats.hits, memory.stats.misses) == (2, 4)
    memory.read(range(1), np.eye(1, 4, 3, dtype=np.float32), files)
    assert {*memory._held} == {(0, 0), (0, 3)}


def test_parts_of_a_graph_let_experts_leave_between_them(tmp_path: Path) -> None:
    folder = mixture(tmp_path, splits=2)
    plain, _ = ran(folder, expert_budget="1GB")
    within, stats = ran(folder, expert_budget=4 * PAGE)
    assert within == plain
    assert stats.max_pass_bytes <= 8 * 6 * PAGE + stats.budget_bytes, "a part has one layer of experts"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("granitemoe", {"expert_budget": 1000}, ["1.0 kB", "at least one expert, ", "bytes", "All experts together"]),
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
    options = ["--prompt", "hello", "--max-new-tokens", "4", "--expert-budget", "64KiB"]
    assert run(["generate", str(bundle), *options]) == 0
    plain = capsys.readouterr()
    assert re.search(r"\[experts: \d+ of \d+ were in memory, .* of 65.5 kB kept between passes", plain.err)
    assert run(["generate", str(bundle), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["experts"]
    assert found["budget_bytes"] == 64 << 10 and found["misses"] > 0
    assert run(["generate", str(bundle), *options[:-1], "1kB"]) == 2
    assert "--expert-budget: got 1.0 kB; expected at least one expert" in capsys.readouterr().err


def test_what_an_expert_has_is_known_from_the_manifest(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    names = [f"model.layers.0.mlp.experts.0.{name}_proj.weight" for name in ("gate", "up", "down")]
    own_bytes = sum(map(manifest.weights.bytes, names))
    with pytest.raises(UsageError, match=f"at least one expert, {own_bytes:,} bytes"):
        ExpertMemory.of(manifest, own_bytes - 1)
    assert ExpertMemory.of(manifest, own_bytes).stats.budget_bytes == own_bytes
