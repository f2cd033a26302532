"""`edgekv hub` with the real client of Qualcomm AI Hub, against the service of `tests/support/aihub_server.py`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from edgekv.bundle import open_bundle
from edgekv.cli import run
from exporters.htp.binary import read_target
from exporters.pipeline.store import store_in
from tests.support.aihub_server import TOKEN, AiHub
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported
from tests.support.thorough import variants

pytestmark = pytest.mark.htp

S24, S25 = "samsung_galaxy_s24_family", "samsung_galaxy_s25_family"
DECODE, PREFILL = "token_ar1_cl64_1_of_1", "prompt_ar8_cl64_1_of_1"
POLL = ("--poll", "0.01")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    """What a command prints with --json."""
    found = run(["hub", *arguments, "--json"])
    printed = capsys.readouterr()
    assert found == code, printed.err
    assert "Traceback" not in printed.err and TOKEN not in printed.out + printed.err
    return json.loads(printed.out)


def test_hosted_devices_are_matched_with_the_catalogue(service: AiHub, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in answer(capsys, "devices")["devices"]}
    assert rows["Samsung Galaxy S25 (Family)"]["soc"] == "SM8750"
    assert rows["Samsung Galaxy S25 (Family)"]["kv_dtypes"] == ["u8", "s16"]
    assert rows["Dragonwing RB3 Gen 2"]["kv_dtypes"] == ["u8"]
    assert (rows["Pixel 9"]["soc"], rows["Pixel 9"]["kv_dtypes"]) == (None, [])
    assert run(["hub", "devices"]) == 0
    assert "SM8750" in capsys.readouterr().out


def test_linking_brings_a_real_binary_for_each_chip_into_the_bundle(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = answer(capsys, "link", str(small), "--devices", "SM8650,Samsung Galaxy S25 (Family)", *POLL)
    assert {(job["kind"], job["state"]) for job in report["jobs"]} == {("compile", "done"), ("link", "done")}
    for slug, soc in ((S24, "SM8650"), (S25, "SM8750")):
        target = read_target(small / "hub" / slug / "link.bin")
        assert target is not None and target.soc == soc
        assert (small / "hub" / slug / f"compile_{DECODE}.dlc").stat().st_size > 10_000
    assert service.count("POST /api/v1/models/") == 2, "each graph is uploaded once for all devices"
    assert not store_in().pieces, "what was uploaded"
    open_bundle(small)


def test_jobs_ask_for_what_genie_needs(service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--devices", "Galaxy S24", "--qairt-version", "2.42", "--no-wait")
    report = answer(capsys, "link", str(small), *arguments)
    decode, prefill, link = (report["jobs"][i] for i in range(3))
    assert (decode["graphs"], prefill["graphs"]) == ([DECODE], [PREFILL])
    assert "--target_runtime qnn_dlc --quantize_io --output_names past_key_0_h0_out," in decode["options"]
    assert ",past_value_1_h1_out,logits --qnn_options" in decode["options"], "in the order of the graph"
    assert decode["options"].endswith(f"--qnn_options context_enable_graphs={DECODE} --qairt_version 2.42")
    assert (link["graphs"], link["options"]) == ([DECODE, PREFILL], "--qairt_version 2.42")
    assert link["sources"] == [decode["product"], prefill["product"]]


def test_a_context_binary_of_each_graph_needs_no_link(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--devices", "Dragonwing RB3 Gen 2", "--runtime", "qnn_context_binary", *POLL)
    (device,) = answer(capsys, "compile", str(small), *options)["devices"]
    assert [artefact["soc"] for artefact in device["artefacts"]] == ["QCS6490"] * 2


def test_one_profile_over_many_devices_ends_in_one_table(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["hub", "profile", str(small), "--devices", "SM8650,SM8750,QCS6490", *POLL]) == 0
    table = capsys.readouterr().out
    assert len(re.findall(r"\d+ us", table)) == 6 and "1 layers on" in table
    assert "SM8650" in table and "SM8750" in table and "QCS6490" in table
    assert f"next: edgekv hub infer {small} --devices " in table
    (small / "hub" / S24 / f"profile_{DECODE}.json").read_text()


def test_inference_of_a_real_step_is_compared_with_the_cpu_engine(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (device,) = answer(capsys, "infer", str(small), "--devices", "SM8650", *POLL)["devices"]
    assert [comparison["graph"] for comparison in device["comparisons"]] == [PREFILL, DECODE]
    for comparison in device["comparisons"]:
        assert comparison["top1_equal"] and all(output["sqnr_db"] is None for output in comparison["outputs"])


def test_rows_of_states_are_compared_too(service: AiHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["lfm2"], gain=1.0)
    hybrid = shutil.copytree(exported(checkpoint, export_options(context=64, ar=(1, 8))), tmp_path / "bundle")
    (device,) = answer(capsys, "infer", str(hybrid), "--devices", "SM8650", *POLL)["devices"]
    for comparison in device["comparisons"]:
        outputs = {output["name"]: output["sqnr_db"] for output in comparison["outputs"]}
        assert {"conv_state_0_out", "conv_state_3_out", "past_key_2_h0_out"} < outputs.keys()
        assert comparison["top1_equal"] and set(outputs.values()) == {None}


@pytest.mark.parametrize("numbered", variants([False, True], [True]))
def test_outputs_that_are_off_by_one_step_are_seen_in_each(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str], numbered: bool
) -> None:
    service.spoil, service.numbered_outputs = True, numbered
    (device,) = answer(capsys, "infer", str(small), "--devices", "SM8650", *POLL)["devices"]
    outputs = [output for comparison in device["comparisons"] for output in comparison["outputs"]]
    assert len(outputs) == 2 * (1 + 8)
    assert all(output["differing"] == 1 and abs(output["max_steps"] - 1) < 0.01 for output in outputs)
    assert all(20 < output["sqnr_db"] < 120 for output in outputs)


def test_the_token_is_written_nowhere(service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["hub", "infer", str(small), "--devices", "SM8650", *POLL]) == 0
    assert run(["hub", "profile", str(small), "--devices", "SM8650", *POLL]) == 0
    printed = capsys.readouterr()
    assert TOKEN not in printed.out + printed.err
    files = [path for path in small.rglob("*") if path.is_file()]
    assert len(files) > 20 and not any(TOKEN.encode() in path.read_bytes() for path in files)


def test_fetching_again_downloads_no_binary_again(
    service: AiHub, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = answer(capsys, "compile", str(small), "--devices", "SM8650", *POLL)["devices"]
    downloads = sum(line.endswith("/download/") for line in service.log)
    assert downloads == 2
    assert answer(capsys, "fetch", str(small))["devices"] == first
    assert sum(line.endswith("/download/") for line in service.log) == downloads
    (small / "hub" / S24 / f"compile_{DECODE}.dlc").write_bytes(b"")
    assert run(["hub", "fetch", str(small)]) == 1
    assert "got sha256" in capsys.readouterr().err
