"""Reports of conformance runs: sealed, impersonal, checked, and used."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import msgspec
import pytest

from devices import find, measured_speed
from devices.measured import FOLDER
from devices.report import (
    FORMAT,
    DecodeResult,
    Difference,
    Failure,
    GraphResult,
    MissingMeasurement,
    Prediction,
    Report,
    ReportError,
    Sample,
    SpeedResult,
    Versions,
    _seal,
    decode_report,
    impersonal,
    read_report,
    sealed,
)
from tests.support.exports import ROOT
from tests.support.kits import report, speed


def written(folder: Path, content: Report, name: str = "yoga-slim") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_bytes(msgspec.json.encode(content))
    return path


def forged(**changes: Any) -> bytes:
    """A report that nobody checked, with the seal that fits it."""
    content = msgspec.structs.replace(report(), **changes)
    return msgspec.json.encode(msgspec.structs.replace(content, seal=_seal(content)))


def test_a_report_is_what_was_written(tmp_path: Path) -> None:
    assert read_report(written(tmp_path, report())) == report()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda text: text.replace(b"62.5", b"99.5"), "seal"),
        (lambda text: text[:-40], "report"),
        (lambda text: text.replace(b'"format":1', b'"format":9'), "format"),
        (lambda text: text.replace(b'"place"', b'"plaice"'), "plaice"),
        (lambda text: b"[" * 100_000, "report"),
    ],
)
def test_a_damaged_report_is_refused(change: Any, named: str) -> None:
    with pytest.raises(ReportError, match=named):
        decode_report(change(msgspec.json.encode(report())))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speeds": [speed(tokens_per_s=200.0)]}, "200.0 tokens/s at 16000 us a step; expected 62.5"),
        ({"speeds": [speed(step_us=1000.0, tokens_per_s=1000.0)]}, "800 GB/s; expected at most"),
        ({"speeds": [speed(step_us=0.0)]}, "expected steps that took time"),
        ({"speeds": [speed(step_us=float("inf"), tokens_per_s=0.0)]}, "speeds"),
        ({"samples": [Sample(at_s=at_s, tokens_per_s=60.0) for at_s in (20.0, 10.0)]}, "times that do not ascend"),
        ({"samples": [Sample(at_s=20.0, tokens_per_s=60.0, celsius=500.0)]}, "20 s: got 500 C; expected -40 to 150"),
        ({"arch": 73}, "SM8750, V73; expected SM8750, V79"),
        ({"soc": "SM9999"}, "a chip of the catalogue"),
        ({"graphs": [GraphResult(name="a", verdict="equal", elements=9, differing=1, max_steps=3)]}, "what these are"),
        ({"graphs": [GraphResult(name="a", verdict="equal")]}, "integers that were compared"),
        ({"graphs": [GraphResult(name="a", verdict="wrong", elements=9)]}, "elements that differ"),
        ({"decode": [DecodeResult(model="m", strategy="slot", verdict="equal", tokens=9, first_wrong=3)]}, "decode"),
    ],
)
def test_a_forged_report_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ReportError, match=named):
        decode_report(forged(**changes))


@pytest.mark.parametrize("path", ["/home/ann/kit/a.bin", r"C:\Users\Ann\kit", "see /tmp/ann/log", r"\\host\share"])
def test_a_report_names_no_place_of_a_machine(path: str) -> None:
    graphs = [GraphResult(name="a", verdict="failed", note=path)]
    with pytest.raises(ReportError, match="no path of a machine"):
        report(graphs=graphs)
    with pytest.raises(ReportError, match="no path of a machine"):
        decode_report(forged(graphs=graphs))


def test_texts_of_libraries_lose_paths_and_names() -> None:
    text = "SIGSEGV: loading '/home/ann/kit 2/graphs/a_qnn.bin' and C:\\Users\\ann\\x.dll for ann on box\n"
    found = impersonal(text, ("ann", "box"))
    assert found == "SIGSEGV: loading 'a_qnn.bin' and x.dll for ... on ..."
    sealed(msgspec.structs.replace(report(), graphs=[GraphResult(name="a", verdict="failed", note=found)]))


@pytest.mark.parametrize(
    "text",
    [
        "no file /srv/Ann Lee/my kit/a.bin: error 5",
        r"no file C:\Users\Ann Lee\kit\a.bin: error 5",
        r"no file 'C:\\Users\\Ann Lee\\kit\\a.bin': error 5",
        r"no file \\host\Ann Lee\kit\a.bin: error 5",
        "no file file:///srv/ann lee/my kit/a.bin: error 5",
    ],
)
def test_names_and_folders_with_spaces_are_lost_too(text: str) -> None:
    places = [PurePosixPath("/srv/Ann Lee/my kit"), PureWindowsPath(r"C:\Users\Ann Lee")]
    found = impersonal(text, ("Ann Lee", "host"), places)
    assert "a.bin" in found and found.endswith("error 5")
    assert not re.search(r"ann|lee|host|[\\/]", found, re.IGNORECASE)


def test_a_report_becomes_the_figures_of_its_chip(tmp_path: Path) -> None:
    small = speed(model="small", read_bytes=4_000_000, step_us=400.0, tokens_per_s=2500.0)
    written(tmp_path / "reports", report(speeds=[speed(), small]))
    found = measured_speed(find("SM8750"), tmp_path / "reports")
    assert found is not None and found.gb_per_s is not None
    assert (found.gb_per_s.low, found.gb_per_s.high, found.pass_s) == (50.0, 50.0, pytest.approx(4e-4))
    assert found.evidence == "measured on SM8750 (report yoga-slim)"
    assert measured_speed(find("SM8650"), tmp_path / "reports") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"place": "emulator"},
        {"graphs": [GraphResult(name="a", verdict="wrong", elements=9, differing=9, max_steps=900)]},
        {"speeds": []},
    ],
)
def test_emulators_and_wrong_results_measure_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    written(tmp_path / "reports", report(**changes))
    assert measured_speed(find("SM8750"), tmp_path / "reports") is None


def test_a_report_without_a_result_of_a_part_is_not_equal() -> None:
    assert report().verdict == "equal"
    assert report(failures=[Failure(part="decode/m/slot", attempts=1, ending="TypeError")]).verdict == "failed"


def test_one_forged_report_among_others_is_named(tmp_path: Path) -> None:
    written(tmp_path / "reports", report())
    (tmp_path / "reports" / "bad.json").write_bytes(forged(arch=73))
    with pytest.raises(ReportError, match=r"bad\.json: soc, arch"):
        measured_speed(find("SM8750"), tmp_path / "reports")


def test_the_reports_of_this_repository_can_be_read() -> None:
    assert FOLDER.is_dir()
    for path in FOLDER.glob("*.json"):
        assert read_report(path).place == "npu", path.name


def test_a_sealed_report_is_plain_json() -> None:
    assert json.loads(msgspec.json.encode(report()))["soc"] == "SM8750"


def test_the_page_of_reports_names_every_field() -> None:
    """Each field of a record is in the section of the page that describes the record."""
    page = (ROOT / "docs/reference/report.md").read_text()
    assert f"format {FORMAT}." in page
    sections = {text.partition("\n")[0]: text for text in page.split("\n## ")[1:]}
    records = {
        "Report": (Report,),
        "versions": (Versions,),
        "graphs": (GraphResult, Difference),
        "decode": (DecodeResult,),
        "speeds": (SpeedResult,),
        "samples": (Sample,),
        "unmeasured": (MissingMeasurement,),
        "predictions": (Prediction,),
        "failures": (Failure,),
    }
    for title, kinds in records.items():
        named = set(re.findall(r"`(\w+)`", sections[title]))
        for kind in kinds:
            assert {field.name for field in msgspec.structs.fields(kind)} <= named, title
