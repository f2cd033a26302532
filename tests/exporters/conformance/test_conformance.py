"""Kits on the emulator as the device: what is right is equal to the bit, and each fault is found and named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from devices import find
from devices.report import GraphResult, Report, read_report
from edgekv.cli import run
from edgekv.conformance.graphs import GraphJob
from edgekv.conformance.kit import LIMIT_BYTES, Kit
from edgekv.conformance.models import DECODE_STRATEGIES, GOLDEN_TOKENS
from edgekv.conformance.run import LocalRunner, RunChoice, run_kit
from edgekv.errors import UsageError
from edgekv.spec import families
from exporters.conformance.families import DRAFTERS, EMBEDDERS, FAMILIES, OF_PICTURES
from exporters.conformance.make import make_kit
from tests.support import kits
from tests.support.exports import kept

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


@pytest.mark.htp
def test_parts_and_models_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--parts: got families; expected a part or a group of operation/norm"):
        make_kit(tmp_path / "kit", find(kits.SOC), parts=["families"])
    with pytest.raises(UsageError, match=r"--checkpoint: got no .*nothing"):
        make_kit(tmp_path / "kit", find(kits.SOC), parts=["decode"], model=tmp_path / "nothing")
    (tmp_path / "kit").mkdir()
    with pytest.raises(UsageError, match="an existing folder"):
        make_kit(tmp_path / "kit", find(kits.SOC))
