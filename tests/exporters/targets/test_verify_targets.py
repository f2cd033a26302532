"""Verify graphs in every form of a bundle: compiled, TFLite, in parts, and in the folders of other runtimes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import edgekv
from edgekv import SamplingParams
from edgekv.bundle import open_bundle
from edgekv.bundle.compiled import COMPILED
from edgekv.cli import run
from edgekv.draft import Speculation
from exporters.targets.genai.options import GenaiOptions
from exporters.targets.genai.write import choose_graphs, write_genai
from exporters.targets.genie.options import GenieOptions
from exporters.targets.genie.write import write_genie
from tests.support.bundles import Oracle
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import export_options, exported

CONTEXT = 48
PROMPT = [*range(40, 52)]
LONG = SamplingParams(max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("verify_targets") / "checkpoint")


def verifying(checkpoint: Path, *, compiled: bool = False, **options: object) -> Path:
    """A bundle with graphs that verify 4 and 8 tokens; a prefill graph has 8 too."""
    chosen = {"context": CONTEXT, "ar": (1, 8), "draft_rows": (4, 8), **options}
    return exported(checkpoint, export_options(**chosen), compiled=compiled)  # type: ignore[arg-type]


def accepted(bundle: Path, engine: str) -> int:
    """Right drafts of a text that is the same as without drafts."""
    with edgekv.load(bundle, engine) as model:
        plain = [token.id for token in model.generate(PROMPT, LONG)]
        drafts = Speculation(drafter=Oracle(PROMPT + plain, model.bundle.manifest.model.vocab))
        generation = model.generate(PROMPT, LONG, speculate=drafts)
        assert [token.id for token in generation] == plain
    stats = generation.stats.speculation
    assert stats is not None
    return stats.accepted


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.htp
def test_a_binary_shares_their_weights_and_runs_them(checkpoint: Path) -> None:
    bundle = verifying(checkpoint, compiled=True)
    record = json.loads((bundle / "compiled" / "SM8650" / COMPILED).read_text())
    names = {f"ar1_cl{CONTEXT}", f"ar8_cl{CONTEXT}", f"ar4_cl{CONTEXT}_verify", f"ar8_cl{CONTEXT}_verify"}
    (shared,) = (binary for binary in record["binaries"] if binary["graphs"] > 1)
    assert shared["wrappers"].keys() == names
    sizes = {file: held["bytes"] for file, held in record["files"].items()}
    assert sizes[shared["file"]] < 0.6 * sum(sizes[b["file"]] for b in record["binaries"] if b["graphs"] == 1)
    assert accepted(bundle, "htp") > 5


@pytest.mark.parametrize("split", [{"splits": 1, "head": "own"}, {"splits": 1, "embedding": "host"}, {"splits": 2}])
def test_parts_verify_drafts(checkpoint: Path, split: dict[str, object]) -> None:
    bundle = verifying(checkpoint, **split)
    parts = {graph.name: [part.name for part in graph.parts] for graph in open_bundle(bundle).manifest.graphs}
    if "splits" in split and "embedding" not in split:  # the head is a part, and those before it are shared
        assert parts[f"ar8_cl{CONTEXT}_verify"] == [*parts[f"ar8_cl{CONTEXT}"][:-1], "head_ar8"]
    assert accepted(bundle, "cpu") > 5


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.htp
def test_parts_verify_drafts_on_the_htp(checkpoint: Path) -> None:
    assert accepted(verifying(checkpoint, splits=2), "htp") > 5


@pytest.mark.slow
@pytest.mark.thorough
def test_a_tflite_file_has_them_and_its_engine_decodes_plainly(checkpoint: Path) -> None:
    bundle = verifying(checkpoint, kv_dtype="s8", graph_format="tflite")
    manifest = open_bundle(bundle).manifest
    assert f"ar8_cl{CONTEXT}_verify" in {graph.name for graph in manifest.graphs}
    with edgekv.load(bundle, "litert") as model:
        verify = model.engine.graphs.largest_verify()
        verify.run(PROMPT[:8], verify.window(8), 0)
        assert verify.logits.shape == (8, manifest.model.vocab)
    assert accepted(bundle, "litert") == 0  # its kernels may sum rows of other graphs in another order


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.htp
def test_genie_runs_them_as_graphs_of_their_ar(checkpoint: Path, tmp_path: Path) -> None:
    """`write_genie` runs Genie and compares its tokens."""
    bundle = open_bundle(verifying(checkpoint, key_layout="columns"))
    written = write_genie(bundle, tmp_path / "genie", GenieOptions(bos=False))
    assert written.checked and {graph.ar for graph in written.graphs} == {1, 4, 8} and len(written.graphs) == 3


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.htp
def test_onnxruntime_genai_does_without_and_says_so(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = verifying(checkpoint)
    assert [graph.role for graph in choose_graphs(open_bundle(bundle))] == ["decode", "prefill"]
    written = write_genai(open_bundle(bundle), tmp_path / "genai", GenaiOptions(None))
    assert written.left_out == [f"ar4_cl{CONTEXT}_verify", f"ar8_cl{CONTEXT}_verify"]
    assert run(["bundle", "genai", str(bundle), "-o", str(tmp_path / "again"), "--skip-check"]) == 0
    assert f"left out: ar4_cl{CONTEXT}_verify, ar8_cl{CONTEXT}_verify" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.htp
def test_ai_hub_runs_each_by_its_name(
    checkpoint: Path, tmp_path: Path, service: object, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = shutil.copytree(verifying(checkpoint), tmp_path / "bundle")
    assert run(["hub", "infer", str(bundle), "--devices", "SM8650", "--poll", "0.01", "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    names = {each["graph"] for each in device["comparisons"] if each["top1_equal"]}
    kinds = ("token_ar1", "prompt_ar8", "verify_ar4", "verify_ar8")
    assert names == {f"{kind}_cl{CONTEXT}_1_of_1" for kind in kinds}
