"""The key of shared exports: it changes with what an export runs, and with nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import write_checkpoint
from tests.dependencies import PACKAGES, ROOT, code_digest, files
from tests.exports import EXPORTS

OBSERVE = """
import os, sys, threading

def observe(frame, event, argument):
    code = frame.f_code
    # Functions; neither modules nor classes, and nothing that an import calls.
    if event == "call" and code.co_flags & 1 and code not in seen and not is_imported(frame):
        seen.add(code)
        os.write(observed, f"{code.co_filename}\\n".encode())

def is_imported(frame):
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__", "__main__") != "__main__":
            return True
        frame = frame.f_back
    return False

seen = set()
observed = os.open(os.environ["OBSERVED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
threading.setprofile(observe)
sys.setprofile(observe)
"""
EXPORT = """
import sys
from pathlib import Path
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import export_bundle
from tests.exports import export_options

chosen = {"context": 64, "ar": (1, 4), "calibration_tokens": 64, "check_on_htp": True, "compile": True}
options = export_options("w4a16-lpbq32-updown8", **chosen)
export_bundle(Checkpoint.open(sys.argv[1]), Path(sys.argv[2]), options)
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the four packages."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_only_files_that_exporting_uses_change_the_key(sources: Path):
    used = {*files(EXPORTS, sources)}
    others = {file for package in PACKAGES for file in (sources / package).rglob("*") if file.is_file()} - used
    before = code_digest(EXPORTS, sources)
    for file in others:
        file.write_text(file.read_text() + "\n")
    assert code_digest(EXPORTS, sources) == before
    for name in ("quantize/matrices.py", "quantize/recipes/w8a16.json", "htp/worker.py"):
        file, former = sources / "exporters" / name, (sources / "exporters" / name).read_text()
        file.write_text(former + "\n")
        assert code_digest(EXPORTS, sources) != before, name
        file.write_text(former)
    (sources / "exporters/quantize/other.txt").write_text("")
    assert code_digest(EXPORTS, sources) != before


def test_serving_prefixes_and_sessions_are_no_part_of_exporting():
    used = {file.relative_to(ROOT).parts[:2] for file in files(EXPORTS)}
    assert used.isdisjoint({("edgekv", name) for name in ("cli", "serve", "prefix", "draft", "paged", "model.py")})


@pytest.mark.thorough
@pytest.mark.htp
@pytest.mark.slow
def test_all_functions_that_exporting_calls_are_in_files_of_the_key(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(OBSERVE)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", {"num_hidden_layers": 1})
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "OBSERVED": str(tmp_path / "observed")}
    command = [sys.executable, "-c", EXPORT, str(checkpoint), str(tmp_path / "bundle")]
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    ran = {Path(line) for line in (tmp_path / "observed").read_text().splitlines()}
    ran = {file for file in ran if ROOT in file.parents and file.relative_to(ROOT).parts[0] in PACKAGES}
    assert len(ran) > 100
    assert {str(file.relative_to(ROOT)) for file in ran} <= {str(file.relative_to(ROOT)) for file in files(EXPORTS)}
