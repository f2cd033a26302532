"""Graphs that the CPU engine builds for `emulate`: fewer nodes than the exported ones, the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import edgekv
from edgekv import BeamParams
from edgekv.bundle import Bundle, open_bundle
from edgekv.graphs.build import emulated
from edgekv.graphs.graph_cache import emulated_bytes
from edgekv.runtime import CpuEngine
from edgekv.runtime.binding import MemoryBinding
from edgekv.spec.parts import Role
from tests.support.bundles import any_step, as_built, outputs, source_of
from tests.support.checkpoints import ARCHITECTURES, EVERY_OPERATION, write_checkpoint
from tests.support.exports import export_options, exported, exported_architecture
from tests.support.thorough import variants

PROMPT = [*range(5, 24)]


USUAL = {*EVERY_OPERATION, "gemma4-newer", "lfm3", "qwen3_5"}


def assert_same_bits(bundle: Bundle, roles: Container[Role] = get_args(Role)) -> None:
    engine = CpuEngine(threads=1)
    for graph in (each for each in bundle.manifest.graphs if each.role in roles):
        for part in graph.parts:
            path, feeds = bundle.part_path(part), any_step(bundle, graph, part)
            plain = outputs(MemoryBinding(engine.session(path)), feeds)
            built, plain = outputs(engine.load(path, part.name), as_built(bundle, feeds)), as_built(bundle, plain)
            assert [name for name in plain if not np.array_equal(plain[name], built[name])] == []
        assert np.ptp(plain["logits"]) > 1000


@pytest.mark.slow
def test_the_built_graph_has_the_bits_of_the_exported_one(bundle: Path) -> None:
    assert_same_bits(open_bundle(bundle))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", variants(ARCHITECTURES, USUAL))
def test_every_architecture_has_the_bits_of_the_exported_graph(architecture: str) -> None:
    """AR-1, AR-8 and the graph that scores: of most architectures AR-1 and this one, which has the nodes of AR-8."""
    roles: tuple[Role, ...] = get_args(Role) if architecture in USUAL else ("decode", "score")
    assert_same_bits(open_bundle(exported_architecture(architecture)), roles)


@pytest.mark.slow
def test_states_of_8_bits_have_the_bits_of_the_exported_graph(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["lfm2"])
    options = export_options(context=64, ar=(1, 8), draft_rows=(4,), state_bits=8)
    assert_same_bits(open_bundle(exported(checkpoint, options)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, {"draft_rows": (4,)}, {"splits": 2}], ids=str)
def test_keys_as_columns_have_the_bits_of_the_exported_graph(tmp_path: Path, shape: Any) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["gemma3"])
    options = export_options(context=64, ar=(1, 8), key_layout="columns", **shape)
    assert_same_bits(open_bundle(exported(checkpoint, options)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"kv_update": "slot"}, {"kv_update": "mirror"}, {"kv_growth": "staggered"}], ids=str
)
def test_exported_graphs_run_where_none_can_be_built(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """They read keys as columns, over two contexts and two AR; the graphs that are built read rows."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    bundle = exported(checkpoint, export_options(context=(32, 64), ar=(1, 8), key_layout="columns"))
    found = []
    for builds in (True, False):
        for module in ("runtime.cpu", "graphs.graph_cache"):
            monkeypatch.setattr(f"edgekv.{module}.can_build", lambda builds=builds: builds)
        monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / f"{builds}"))
        with edgekv.load(bundle, **options) as model:
            layouts = {group.geometry.key_layout for group in model.cache.groups}
            assert layouts == {"rows" if builds else "columns"}
            texts = [[token.id for token in model.generate(PROMPT, 40, ignore_eos=True)]]
            if "kv_growth" not in options:
                beams = model.generate(PROMPT, BeamParams(3, 3, max_new_tokens=25))
                texts += [[*each.tokens] for each in beams.sequences]
            found.append(texts)
    assert found[0] == found[1] and len(found[0][0]) == 40


@pytest.mark.slow
def test_the_number_of_nodes_does_not_grow_with_the_heads(tmp_path: Path) -> None:
    nodes = []
    for heads in (4, 8):
        shape = {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
        bundle = exported(write_checkpoint(tmp_path / f"{heads}", shape), export_options(context=16, ar=(1,)))
        graph = emulated(source_of(bundle, "ar1_cl16.onnx.gz")).graph
        constants = {each.name for each in graph.initializer}
        for node in graph.node:  # the runtime computes these when it loads the graph
            if constants.issuperset(node.input):
                constants.update(node.output)
        nodes.append(sum(not constants.issuperset(node.input) for node in graph.node))
    assert nodes[0] == nodes[1]


def test_a_file_that_is_no_graph_of_the_bundle_is_refused(small: Path) -> None:
    with pytest.raises(ValueError, match=r"file: got other\.onnx; expected a graph of the bundle"):
        source_of(small, "other.onnx")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept graphs in a cache of its own."""
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "emulated"


def test_a_built_graph_is_kept_and_built_again_when_it_is_damaged(small: Path, kept: Path) -> None:
    source = source_of(small)
    content = emulated_bytes(source)
    (file,) = kept.iterdir()
    made_ns = file.stat().st_mtime_ns
    assert emulated_bytes(source) == content == emulated(source).SerializeToString()
    assert file.stat().st_mtime_ns == made_ns
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    assert emulated_bytes(source) == content and [*kept.iterdir()] == [file] and file.read_bytes() != damaged


def test_each_graph_and_each_bundle_has_a_graph_of_its_own(small: Path, tmp_path: Path, kept: Path) -> None:
    other = exported(
        write_checkpoint(tmp_path / "other", {"num_hidden_layers": 1}), export_options(context=64, ar=(1,))
    )
    found = {emulated_bytes(source_of(small, f"ar{ar}_cl64.onnx.gz")) for ar in (1, 8)} | {
        emulated_bytes(source_of(other))
    }
    assert len(found) == 3 == len([*kept.iterdir()])


def test_only_so_many_graphs_are_kept(small: Path, kept: Path) -> None:
    kept.mkdir(parents=True)
    for number in range(70):
        (kept / f"{number}.onnx").touch()
        os.utime(kept / f"{number}.onnx", (number, number))
    emulated_bytes(source_of(small))
    assert len([*kept.iterdir()]) == 64 and not (kept / "6.onnx").exists() and (kept / "7.onnx").exists()


def test_graphs_are_built_without_a_cache_folder(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "file" / "cache"))
    source = source_of(small)
    assert emulated_bytes(source) == emulated(source).SerializeToString()


@pytest.mark.slow
def test_a_kept_graph_is_loaded_without_the_package_that_builds(small: Path, kept: Path) -> None:
    program = "import sys, edgekv; print([t.id for t in edgekv.load(sys.argv[1]).generate([5, 6, 7], 2)]); "
    program += "print('onnx' in sys.modules)"
    first, second = (
        subprocess.run([sys.executable, "-c", program, str(small)], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert first.split("]")[0] == second.split("]")[0] and (first.split()[-1], second.split()[-1]) == ("True", "False")
