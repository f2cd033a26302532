"""`edgekv doctor` on this machine, with what is installed here."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from edgekv.cli.app import run
from edgekv.doctor import examine, list_packages, require
from edgekv.doctor.examine import run_probe
from edgekv.doctor.finding import NotInstalledError
from edgekv.doctor.samples import IR_VERSION, OPSET, onnx_norm_case, write_onnx_norm
from exporters.graphs.parts import stored_graph
from tests.support.aihub_server import DEVICES, TOKEN, AiHub

PACKAGES = {
    "engine cpu": "onnxruntime",
    "engine htp": "onnxruntime-qnn",
    "engine litert": "ai-edge-litert",
    "engine tflite": "tflite-runtime",
    "Qualcomm's libraries": "onnxruntime-qnn",
    "genie": "onnxruntime-qnn",
    "onnxruntime-genai": "onnxruntime-genai",
    "Qualcomm AI Hub": "qai-hub",
}


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@pytest.mark.htp
def test_what_is_installed_is_tried_and_the_rest_named(
    service: AiHub, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A verdict comes first, and each package once."""
    (tmp_path / "client.ini").unlink()
    monkeypatch.setattr("edgekv.cli.doctor.examine", cache(examine))  # shown twice
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(cache_dir))
    assert run(["doctor", "--json"]) == 0
    examined = json.loads(capsys.readouterr().out)
    assert examined["core_works"] and examined["edgekv"] == metadata.version("edgekv")
    findings = {finding["name"]: finding for finding in examined["findings"]}
    assert set(findings) == set(PACKAGES)
    for name, package in PACKAGES.items():
        finding, version = findings[name], version_of(package)
        if version is None:
            assert finding["status"] == "missing" and 'pip install "edgekv[' in finding["fix"]
        elif package == "qai-hub":
            assert finding["status"] == "not configured" and "qai-hub configure" in finding["fix"]
        elif package == "tflite-runtime" and np.lib.NumpyVersion(np.__version__) >= "2.0.0":
            assert finding["status"] == "broken" and 'pip install "numpy<2"' in finding["fix"]
            assert f"numpy {np.__version__}: it was built for numpy below 2" in finding["detail"]
        else:
            assert finding["status"] == "works" and version in finding["detail"], finding
    assert run(["doctor"]) == 0
    verdict, *lines = capsys.readouterr().out.splitlines()
    assert verdict.startswith("Bundles run on this machine. Works: engine cpu, ")
    assert any(re.search(r", \d+ cores, [\d.]+ GB of RAM$", line) for line in lines[:3])
    assert any(line.startswith(f"cache {cache_dir}: ") for line in lines[:4])
    names = [line.split()[0] for line in lines[lines.index("", 5) + 1 :] if line.strip()]
    assert "onnx" in names and len(names) == len(set(names))


@pytest.mark.thorough
@pytest.mark.slow
def test_devices_are_listed_if_the_client_is_configured_and_the_token_never(
    service: AiHub, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = run_probe("hub", "exporters.targets.probes:aihub")
    assert finding.status == "works" and finding.devices == [device.name for device in DEVICES]
    assert run(["doctor"]) == 0
    printed = capsys.readouterr()
    assert DEVICES[0].name in printed.out
    assert TOKEN not in printed.out + printed.err


@pytest.mark.slow
def test_a_service_that_refuses_the_token_is_a_finding(service: AiHub, tmp_path: Path) -> None:
    file = tmp_path / "client.ini"
    file.write_text(file.read_text().replace(TOKEN, "another"))
    finding = run_probe("hub", "exporters.targets.probes:aihub")
    assert finding.status == "broken" and "an API token that the service rejects" in finding.detail
    assert "another" not in str(finding)


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [
        ("return Finding(status='works', detail='fine')", "works", "fine"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "broken", "ended with SIGSEGV"),
        ("time.sleep(60)", "broken", "no answer within 3 s"),
        ("raise ImportError('numpy.core failed')", "broken", "ImportError: numpy.core failed"),
        ("return require('no-such-package', 'htp')", "missing", "not installed"),
        ("raise EngineError('x', got=1, expected=2, fix='y')", "broken", "x: got 1"),
    ],
)
def test_a_probe_that_crashes_hangs_or_raises_is_a_finding_like_others(
    body: str, status: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other_probe.py").write_text(
        "import os, signal, time\nfrom edgekv.doctor import Finding, require\nfrom edgekv.errors import EngineError\n"
        f"def probe():\n    {body}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    finding = run_probe("other", "other_probe:probe", timeout_s=3)
    assert (finding.name, finding.status) == ("other", status)
    assert detail in finding.detail


@pytest.mark.thorough
@pytest.mark.htp
def test_a_core_that_lacks_a_package_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An installation of edgekv that asks for more than there is, and registers no further probes."""
    info = tmp_path / "edgekv-9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: edgekv\nVersion: 9.0\nProvides-Extra: htp\nProvides-Extra: test\n"
        "Requires-Dist: numpy>=1\nRequires-Dist: no-such-package>=3; python_version>='3'\n"
        "Requires-Dist: onnxruntime==0.1; extra == 'htp'\nRequires-Dist: pytest; extra == 'test'\n"
        "Requires-Dist: too-old; python_version<'3'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = {(package.name, package.extra): package for package in list_packages()}
    assert set(found) == {("numpy", None), ("no-such-package", None), ("onnxruntime", "htp")}
    assert found["numpy", None].fits and found["numpy", None].installed == np.__version__
    assert found["no-such-package", None].installed is None
    assert not found["onnxruntime", "htp"].fits and found["onnxruntime", "htp"].installed == ort.__version__
    assert run(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "no-such-package  -" in printed and printed.startswith("Bundles do not run on this machine. Works: ")


def test_the_sample_graph_gives_what_its_case_says(tmp_path: Path) -> None:
    write_onnx_norm(tmp_path / "norm.onnx")
    x, y = onnx_norm_case()
    (found,) = ort.InferenceSession(tmp_path / "norm.onnx").run(None, {"x": x})
    assert np.array_equal(found, y)


def test_the_sample_graph_has_the_operator_set_of_exported_graphs(small: Path, tmp_path: Path) -> None:
    """A runtime that loads the sample and not a bundle would be called working."""
    write_onnx_norm(tmp_path / "norm.onnx")
    sample = onnx.load(tmp_path / "norm.onnx")
    exported = stored_graph(next(small.glob("ar1_*.onnx.gz")))
    for model in (sample, exported):
        assert ([each.version for each in model.opset_import], model.ir_version) == ([OPSET], IR_VERSION)
    assert {node.op_type for node in sample.graph.node} <= {node.op_type for node in exported.graph.node}


def test_a_package_of_edgekv_itself_needs_no_extra() -> None:
    assert require("numpy") == f"numpy {np.__version__}"
    with pytest.raises(NotInstalledError, match=r"pip install edgekv$"):
        require("no-such-package")
