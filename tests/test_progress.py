from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from edgekv.bundle import open_bundle
from edgekv.cli import run
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.cli.next_step import next_line
from exporters.export import RunOptions, export_bundle
from exporters.progress import one_step
from tests.checkpoints import write_checkpoint
from tests.exports import small_options

Told = list[tuple[str, int, int]]


def _told(told: Told) -> dict[str, list[tuple[int, int]]]:
    stages: dict[str, list[tuple[int, int]]] = {}
    for stage, done, total in told:
        stages.setdefault(stage, []).append((done, total))
    return stages


@pytest.mark.slow
def test_every_phase_of_an_export_is_named_while_it_runs(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint", {"num_hidden_layers": 3})))
    told: Told = []
    options = small_options(context=64, ar=(1, 16))
    run = RunOptions(cache_dir=tmp_path / "cache")
    export_bundle(checkpoint, tmp_path / "bundle", options, run, progress=lambda *each: told.append(each))
    stages = _told(told)
    phases = ["prepare", "hash weights", "read", "survey", "quantize", "quantize head"]
    assert [*stages] == [*phases, "write", "hash files", "seal"]
    for steps in stages.values():
        (first, _), (last, total) = steps[0], steps[-1]
        assert first == 0 < last == total
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert {of for _, of in steps} == {total}
    order = [stage for stage, _, _ in told]
    assert order == sorted(order, key=[*stages].index), "one phase ends before the next begins"
    assert len(stages["survey"]) == stages["survey"][-1][1] + 1 > 3, "the survey tells of each window in each layer"


def test_a_phase_that_fails_is_not_told_to_be_finished() -> None:
    told: Told = []
    with pytest.raises(KeyboardInterrupt), one_step("seal", lambda *each: told.append(each)):
        raise KeyboardInterrupt
    assert told == [("seal", 0, 1)]


@pytest.mark.thorough
@pytest.mark.htp
@pytest.mark.slow
def test_compiling_tells_of_its_phases_on_standard_error_and_names_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, checkpoint = tmp_path / "a bundle", write_checkpoint(tmp_path / "checkpoint")
    export = ["export", str(checkpoint), "-o", str(target), "--context", "64", "--calibration-tokens", "512"]
    assert run([*export, "--device", "SM8650", "--skip-htp-check"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"next: edgekv compile '{target}' --device SM8650"
    assert run(["compile", str(target), "--device", "SM8650"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith(f"next: edgekv generate '{target}' --prompt ")
    assert [line.split(" ━")[0].strip() for line in printed.err.splitlines()] == ["verify bundle", "compile", "seal"]


def test_the_next_command_runs_the_bundle_where_it_can_run(small: Path) -> None:
    manifest = open_bundle(small).manifest
    assert next_line(small, manifest, is_compiled=False) == f"next: edgekv compile {small} --device SM8650"
    assert next_line(small, manifest, is_compiled=True).endswith(" --engine htp")
    tflite = structs.replace(manifest, graph_format="tflite")
    assert next_line(small, tflite, is_compiled=True).endswith(" --engine litert")
    head = structs.replace(manifest.graphs[0].parts[0], embeds=False)
    graphs = [structs.replace(manifest.graphs[0], parts=[head])]
    assert "--engine" not in next_line(small, structs.replace(manifest, graphs=graphs), is_compiled=True)
