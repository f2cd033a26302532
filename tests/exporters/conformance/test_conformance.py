"""Kits on the emulator as the device: what is right is equal to the bit, and each fault is found and named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from devices import find
from devices.report import GraphResult, MissingMeasurement, Report, Sample, read_report
from edgekv.cli import run
from edgekv.conformance.graphs import GraphJob
from edgekv.conformance.kit import LIMIT_BYTES, Kit, open_kit
from edgekv.conformance.models import DECODE_STRATEGIES, GOLDEN_TOKENS
from edgekv.conformance.run import LocalRunner, RunChoice, run_kit
from edgekv.errors import BundleError, UsageError
from edgekv.spec import encoders, families
from exporters.conformance import make as making
from exporters.conformance.encoders import KINDS, OF_MODEL
from exporters.conformance.families import DRAFTERS, EMBEDDERS, FAMILIES, OF_PICTURES
from exporters.conformance.make import make_kit
from exporters.conformance.operations import OPERATIONS
from exporters.conformance.page import render_page
from tests.support import kits
from tests.support.exports import export_options, exported, kept

GRAPHS = RunChoice(("family", "operation"), minutes=0)


def faulty_binaries(change: Callable[[onnx.ModelProto], onnx.ModelProto]) -> Path:
    return kept("faulty", kits.CODE, lambda folder: kits.write_faulty(folder, change), change.__name__) / "graphs"


def found_on(runner: LocalRunner, kit: Kit, folder: Path, choice: RunChoice = GRAPHS) -> Report:
    return run_kit(kit, runner, folder / "report.json", choice)


def of_family(report: Report) -> GraphResult:
    return next(result for result in report.graphs if result.name == "family/llama")


def test_every_family_is_in_a_kit_or_says_why_not() -> None:
    """A new file in `edgekv/spec/families` belongs into one of these lists."""
    modules = {path.stem for path in Path(families.__file__).parent.glob("*.py")} - {"__init__"}
    assert {*FAMILIES, *OF_PICTURES, *EMBEDDERS, *DRAFTERS} == modules
    assert {*OF_PICTURES.values()} <= FAMILIES.keys()


def test_a_kit_has_an_encoder_of_every_family() -> None:
    """A new file in `edgekv/spec/encoders` belongs into one of these lists."""
    shared = {"__init__", "names", "processor", "qwen_vl"}
    modules = {path.stem for path in Path(encoders.__file__).parent.glob("*.py")} - shared
    assert {*KINDS, *OF_MODEL} == modules


@pytest.mark.htp
@pytest.mark.parametrize("name", ["gemma4", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_encoders_give_their_integers(tmp_path: Path, name: str) -> None:
    """All outputs: of Gemma 4's what layers of its decoder read, too."""
    kit = make_kit(tmp_path / "kit", find(kits.SOC), parts=[f"vision/{name}"])
    (part,) = kit.manifest.parts
    assert part.graph.results == ["image_features", *(["layer_rows"] if name == "gemma4" else [])]
    found = found_on(LocalRunner(), kit, tmp_path, RunChoice(("vision",), minutes=0))
    assert found.verdict == "equal" and [graph.name for graph in found.graphs] == [f"vision/{name}"]


def test_a_page_says_what_was_not_measured_and_shows_the_long_decode() -> None:
    gap = MissingMeasurement(what="registering addresses", reason="<a program> binds its own memory")
    samples = [Sample(at_s=10.0 * number, tokens_per_s=50.0, celsius=40.0 + number) for number in range(3)]
    page = render_page(kits.report(unmeasured=[gap], samples=samples))
    assert "Not measured" in page and "&lt;a program&gt; binds its own memory" in page
    assert "Temperature during a long decode" in page
    assert "Not measured" not in render_page(kits.report())


@pytest.mark.htp
@pytest.mark.slow
def test_a_right_device_is_equal_to_the_bit(kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Graphs, golden tokens with each strategy, speeds of each graph, and a long decode."""
    output = str(tmp_path / "report.json")
    assert run(["conformance", "run", str(kit.path), "-o", output, "--minutes", "0.01", "-q"]) == 0
    found = read_report(Path(output))
    assert (found.verdict, found.place, found.failures) == ("equal", "emulator", [])
    assert {result.verdict for result in found.graphs} == {"equal"} and len(found.graphs) == 2
    assert [(each.strategy, each.verdict, each.tokens) for each in found.decode] == [
        (strategy, "equal", GOLDEN_TOKENS) for strategy in DECODE_STRATEGIES
    ]
    measured = {(each.strategy, each.ar) for each in found.speeds}
    assert measured == {("slot", 1), ("slot", 8), ("slot", 32), ("slot", 128), ("pointer-shift", 1)}
    assert found.samples and found.samples[-1].tokens_per_s > 0
    sources = {(each.source, each.ar) for each in found.predictions}
    assert sources >= {("plan", 1), ("estimate", 1), ("estimate", 128)}
    text = capsys.readouterr().out
    assert "graphs: 2 equal" in text and "by plan; " in text and "by estimate" in text
    page = tmp_path / "page.html"
    assert run(["conformance", "show", output, "--html", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == text.splitlines()
    assert "Golden tokens" in page.read_text() and "pointer-shift" in page.read_text()
    assert kit.manifest.bytes < LIMIT_BYTES


@pytest.mark.htp
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "operation", "before"),
    [
        (kits.wrong_scale, "layers.0.silu", "layers.0.sigmoid"),
        (kits.swapped_heads, "layers.0.attention.5", ""),
    ],
)
def test_a_device_that_computes_something_else_is_found_by_its_first_operation(
    kit: Kit, tmp_path: Path, change: Callable[[onnx.ModelProto], onnx.ModelProto], operation: str, before: str
) -> None:
    copy = shutil.copytree(kit.path, tmp_path / "kit")
    for file in faulty_binaries(change).glob("*"):
        (copy / "graphs" / file.name).unlink()
        shutil.copyfile(file, copy / "graphs" / file.name)
    found = of_family(found_on(LocalRunner(), kits.sealed_again(copy), tmp_path))
    assert found.verdict == "wrong" and found.first is not None
    assert (found.first.operation, found.first.graph) == (operation, "llama-piece_0")
    assert before in ("", found.first.before)


@pytest.mark.htp
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "operation", "note"),
    [
        (kits.stale_row, "layers.0.scores.g0", ""),
        (kits.narrow_mask, "layers.0.masked.g0", ""),
        (kits.ignores_inputs, "embedding", "ignores its inputs: two of them gave the same results"),
    ],
)
def test_a_runtime_that_feeds_something_else_is_found_by_its_first_operation(
    kit: Kit, tmp_path: Path, fault: Callable[[GraphJob], GraphResult], operation: str, note: str
) -> None:
    found = of_family(found_on(LocalRunner(run_graph=fault), kit, tmp_path))
    assert found.verdict == "wrong" and found.first is not None
    assert (found.first.operation, found.first.graph, found.note) == (operation, "llama-piece_0", note)


@pytest.mark.htp
@pytest.mark.slow
def test_a_crash_while_the_operation_is_looked_for_is_named(kit: Kit, tmp_path: Path) -> None:
    found = found_on(LocalRunner(run_graph=kits.wrong_then_crashes), kit, tmp_path)
    assert of_family(found).verdict == "crashed"
    assert [(each.part, each.attempts) for each in found.failures] == [("family/llama", 2)]


@pytest.mark.htp
@pytest.mark.thorough
def test_a_stale_row_of_one_strategy_is_found_by_its_place(kit: Kit, tmp_path: Path) -> None:
    runner = LocalRunner(run_decode=kits.stale_cache)
    found = found_on(runner, kit, tmp_path, RunChoice(("decode",), minutes=0))
    by_strategy = {each.strategy: each for each in found.decode}
    assert {name for name, each in by_strategy.items() if each.verdict == "wrong"} == {"pointer-shift"}
    wrong = by_strategy["pointer-shift"]
    assert wrong.row == f"past_key_0_h0_in, row {kits.STALE_ROW}" and wrong.max_steps > 4


@pytest.fixture(scope="module")
def users_bundle(wide: Path) -> Path:
    """A bundle for the chip of the kit, with two contexts."""
    options = export_options(device=kits.SOC, context=(32, 64), ar=(1, 8), key_layout="rows", check_on_htp=True)
    return exported(wide, options, compiled=True)


@pytest.mark.htp
@pytest.mark.slow
def test_a_bundle_of_the_users_is_decoded_and_measured_in_each_context(users_bundle: Path, tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        make_kit(folder / "kit", find(kits.SOC), parts=["operation/norm"], bundle=users_bundle)

    kit = open_kit(kept("kit-bundle", kits.CODE, make, users_bundle.parent.name) / "kit")
    (model,) = kit.manifest.models
    assert (model.name, model.weights_bytes > 100_000) == (users_bundle.name, True)
    assert {file.name for file in users_bundle.rglob("*") if file.is_file()} <= {
        file.name for file in (kit.path / model.folder).rglob("*")
    }
    found = found_on(LocalRunner(), kit, tmp_path, RunChoice((f"decode/{model.name}/slot", "speed"), minutes=0))
    (decoded,) = found.decode
    assert (decoded.verdict, decoded.tokens > 1, found.failures) == ("equal", True, [])
    measured = [(each.strategy, each.ar, each.context) for each in found.speeds]
    graphs = [(ar, context) for ar in (1, 8) for context in (32, 64)]
    assert sorted(measured) == sorted(
        [("slot", *graph) for graph in graphs] + [("pointer-shift", 1, 32), ("pointer-shift", 1, 64)]
    )
    assert {(each.source, each.context) for each in found.predictions} >= {("plan", 64), ("estimate", 32)}


@pytest.mark.htp
def test_a_bundle_that_a_kit_cannot_hold_is_refused_first(users_bundle: Path, wide: Path, tmp_path: Path) -> None:
    def refusal(bundle: Path, **options: Any) -> str:
        with pytest.raises((UsageError, BundleError)) as caught:
            make_kit(tmp_path / "kit", find(options.pop("soc", kits.SOC)), bundle=bundle, **options)
        assert not (tmp_path / "kit").exists()
        return str(caught.value)

    own = tmp_path / wide.name
    shutil.copytree(users_bundle, own)
    assert "--bundle: got a folder checkpoint; expected another name than the kit's own" in refusal(own, model=wide)
    other = refusal(users_bundle, soc="SM8650")
    assert "--bundle: got no such binaries; expected compiled/SM8650 by onnxruntime-qnn" in other
    assert f"edgekv compile {users_bundle} --device SM8650 --force" in other
    (own / "compiled" / kits.SOC / "compiled.json").write_text("{}")
    assert "compiled.json" in refusal(own)
    next(own.glob("*.safetensors")).write_bytes(b"changed")
    assert "safetensors" in refusal(own)


@pytest.mark.htp
@pytest.mark.slow
def test_what_a_chip_cannot_run_is_left_out_and_named(wide: Path, tmp_path: Path) -> None:
    """V68 has no products of 16-bit integers: no delta rule, no vision encoder. One that was asked for is refused."""
    for part in ("operation/delta-rule", "family/qwen3_5", "vision"):
        with pytest.raises(UsageError, match=r"--device: got QCS6490 \(V68\); expected V73 or later"):
            make_kit(tmp_path / "kit", find("QCS6490"), parts=[part])
    assert not (tmp_path / "kit").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "FAMILIES", {name: FAMILIES[name] for name in ("lfm2", "qwen3_5")})
        patch.setattr(making, "OPERATIONS", {name: OPERATIONS[name] for name in ("state", "delta-rule")})
        kit = make_kit(tmp_path / "kit", find("QCS6490"), model=wide)
    assert [part.name for part in kit.manifest.parts] == ["operation/state", "family/lfm2"]
    seen = ["vision", *(f"vision/{name}" for name in sorted(KINDS))]
    assert sorted(kit.manifest.left_out) == ["family/qwen3_5", "operation/delta-rule", *seen]
    found = found_on(LocalRunner(), kit, tmp_path)
    assert found.verdict == "equal"
    reasons = {each.what: each.reason for each in found.unmeasured}
    assert reasons["family/qwen3_5"].startswith("it needs V73 or later: products of gated delta rules")


@pytest.mark.htp
def test_parts_and_models_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--parts: got families; expected a part or a group of operation/norm"):
        make_kit(tmp_path / "kit", find(kits.SOC), parts=["families"])
    with pytest.raises(UsageError, match=r"--checkpoint: got no .*nothing"):
        make_kit(tmp_path / "kit", find(kits.SOC), parts=["decode"], model=tmp_path / "nothing")
    (tmp_path / "kit").mkdir()
    with pytest.raises(UsageError, match="an existing folder"):
        make_kit(tmp_path / "kit", find(kits.SOC))
