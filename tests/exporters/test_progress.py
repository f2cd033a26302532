from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import structs

from edgekv.bundle import open_bundle
from edgekv.cli import run
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.cli import next_step
from exporters.cli.next_step import next_line
from exporters.cli.pieces import resumable
from exporters.export import RunOptions, export_bundle
from exporters.pipeline import place
from exporters.progress import one_step, progress_bars, silent
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import small_options

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


def test_what_the_configuration_tells_is_refused_before_weights_are_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object) -> None:
        raise AssertionError("it opens the checkpoint")

    monkeypatch.setattr(place, "open_checkpoint", opened)
    checkpoint, there = write_checkpoint(tmp_path / "checkpoint"), tmp_path / "there"
    there.mkdir()
    (tmp_path / "file").write_text("")
    for target, options, said in (
        (there, [], "got an existing folder; expected a path that does not exist"),
        (tmp_path / "file" / "bundle", [], "got Not a directory; expected a writable folder"),
        (Path("/proc/nothing/bundle"), [], "expected a writable folder"),
        (tmp_path / "new", ["--context", "100000"], "--context: got 100000; expected at most"),
    ):
        assert run(["export", str(checkpoint), "-o", str(target), *options]) != 0
        assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "file", "there"]


def test_work_that_is_interrupted_after_a_piece_names_resume(capsys: pytest.CaptureFixture[str]) -> None:
    for stage, said in (("survey", "Some pieces are finished"), ("quantize", "3 layers are finished")):
        with pytest.raises(KeyboardInterrupt), resumable(silent) as progress:
            progress(stage, 3, 9)
            progress("seal", 0, 1)
            raise KeyboardInterrupt
        assert capsys.readouterr().err == f"{said}. Run the same command with --resume to continue.\n"
    with pytest.raises(KeyboardInterrupt), resumable(silent) as progress:
        progress("prepare", 1, 1)
        progress("survey", 0, 9)
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""


def test_a_log_has_a_line_for_each_phase_and_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars() as progress:
        for done in range(101):
            progress("quantize", done, 100)
        with one_step("seal", progress):
            pass
    lines = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == [*(f"quantize: {done} of 100" for done in range(0, 101, 10)), "seal: 0 of 1", "seal: 1 of 1"]
    with progress_bars(is_quiet=True) as progress:
        progress("quantize", 1, 1)
    assert capsys.readouterr().err == ""


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
    told = [line.split(": ")[0] for line in printed.err.splitlines()]
    assert [*dict.fromkeys(told)] == ["verify bundle", "compile", "seal"]


def test_the_next_command_needs_nothing_that_is_not_installed(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_step, "missing_packages", lambda package, extra: ["onnxruntime-qnn"])
    manifest = open_bundle(small).manifest
    assert next_line(small, manifest, is_compiled=False) == f'next: edgekv generate {small} --prompt "Once upon a time"'


def test_an_export_for_no_chip_is_for_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, checkpoint = tmp_path / "bundle", write_checkpoint(tmp_path / "checkpoint")
    export = ["export", str(checkpoint), "-o", str(target), "--context", "64", "--calibration-tokens", "512"]
    assert run([*export, "--compile"]) == 2
    assert "--device: got none with --compile; expected a chip, such as" in capsys.readouterr().err
    assert run(export) == 0
    first, *_, about, following = capsys.readouterr().out.splitlines()
    assert run(["info", str(target)]) == 0
    assert re.search(r", (\S+) MB$", first)[1] == re.search(r"^  MB +(\S+):", capsys.readouterr().out, re.M)[1]  # type: ignore[index]
    assert about == "  for the CPU; edgekv compile --device DEVICE checks and compiles it for a chip"
    assert following == f'next: edgekv generate {target} --prompt "Once upon a time"'
    assert run(["generate", str(target), "Once", "--max-new-tokens", "2"]) == 0


def test_the_next_command_runs_the_bundle_where_it_can_run(small: Path) -> None:
    manifest = open_bundle(small).manifest
    assert next_line(small, manifest, is_compiled=False) == f"next: edgekv compile {small} --device SM8650"
    assert next_line(small, manifest, is_compiled=True).endswith(" --engine htp")
    tflite = structs.replace(manifest, graph_format="tflite")
    assert next_line(small, tflite, is_compiled=True).endswith(" --engine litert")
    head = structs.replace(manifest.graphs[0].parts[0], embeds=False)
    graphs = [structs.replace(manifest.graphs[0], parts=[head])]
    assert "--engine" not in next_line(small, structs.replace(manifest, graphs=graphs), is_compiled=True)
