"""The shared exports of the tests: made once, remade when they were touched, and reported when they were."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgekv.bundle import open_bundle
from tests.support import exports
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import EXPORTS, ROOT, code_files, export_options, exported, kept

PACKAGES = ("devices", "edgekv", "exporters", "quant")
MAKE = """
import sys, time
from pathlib import Path
from tests.support import exports

def make(folder):
    with open(sys.argv[2], "a") as calls:
        calls.write("made ")
    time.sleep(0.5)
    (folder / "file").write_text("whole")

exports.CACHE = Path(sys.argv[1])
assert (exports.kept("folder", ("quant",), make, "key") / "file").read_text() == "whole"
"""
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
from tests.support.exports import export_options

chosen = {"context": 64, "ar": (1, 4), "calibration_tokens": 64, "check_on_htp": True, "compile": True}
options = export_options("w4a16-lpbq32-updown8", **chosen)
export_bundle(Checkpoint.open(sys.argv[1]), Path(sys.argv[2]), options)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(exports, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(exports, "_used", set())
    exports.platform_folder.cache_clear()
    yield tmp_path / "cache"
    exports.platform_folder.cache_clear()


@pytest.mark.thorough
@pytest.mark.slow
def test_processes_that_ask_at_once_share_what_the_first_makes(tmp_path):
    command = [sys.executable, "-c", MAKE, str(tmp_path / "cache"), str(tmp_path / "calls")]
    children = [subprocess.Popen(command, cwd=exports.ROOT) for _ in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert (tmp_path / "calls").read_text() == "made "


def test_a_folder_that_was_written_to_is_reported_and_made_again(cache):
    def make(folder: Path) -> None:
        (folder / "file").write_text("as made")

    folder = kept("folder", ("quant",), make, 1)
    assert exports.changed() == []
    (folder / "other").write_text("by a test")
    assert exports.changed() == [str(folder / "other")]
    assert kept("folder", ("quant",), make, 1) == folder and kept("folder", ("quant",), make, 2) != folder
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert exports.changed() == []


def test_what_failed_is_tried_again(cache):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept("folder", ("quant",), fail)
    assert [*kept("folder", ("quant",), lambda folder: None).iterdir()] == []


@pytest.mark.slow
def test_an_export_is_found_by_its_checkpoint_and_options(cache, tmp_path):
    one = write_checkpoint(tmp_path / "one", {"num_hidden_layers": 1})
    other = write_checkpoint(tmp_path / "other", {"num_hidden_layers": 1}, seed=1)
    again = write_checkpoint(tmp_path / "again", {"num_hidden_layers": 1})
    options = export_options(context=32, ar=(1, 8), calibration_tokens=64)
    first = exported(one, options)
    assert exported(again, options) == first != exported(other, options)
    assert exported(one, export_options(context=48, ar=(1, 8), calibration_tokens=64)) != first
    source = open_bundle(first).manifest.source
    assert source.checkpoint == str(first.parent / "checkpoint")


def test_what_was_not_used_for_longest_makes_room(cache, monkeypatch):
    long_ago = time.time() - 2 * exports.LONGEST_RUN_S
    folders = [kept(name, ("quant",), lambda folder: (folder / "file").write_bytes(bytes(100))) for name in "abcd"]
    for age_s, folder in enumerate(folders):
        if folder != folders[3]:  # in use
            os.utime(folder.with_suffix(".json"), (long_ago - age_s,) * 2)
    monkeypatch.setattr(exports, "KEPT_BYTES", 250)
    exports.prune()
    assert [folder.exists() for folder in folders] == [True, False, False, True]


# The key


def test_the_key_is_the_code_of_exports_and_data_beside_it() -> None:
    used = {str(file.relative_to(ROOT)) for file in code_files(EXPORTS)}
    wanted = {"quantize/matrices.py", "quantize/recipes/w8a16.json", "quantize/calibration.txt"}
    assert {"edgekv/qnn/worker.py", *(f"exporters/{name}" for name in wanted)} <= used
    runs = tuple(f"edgekv/{name}" for name in ("cli/", "serve/", "prefix/", "draft/", "paged/", "model.py"))
    assert not [name for name in used if name.startswith(runs)]


@pytest.mark.thorough
@pytest.mark.htp
@pytest.mark.slow
def test_all_functions_that_exporting_calls_are_in_files_of_the_key(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OBSERVE)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", {"num_hidden_layers": 1})
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "OBSERVED": str(tmp_path / "observed")}
    command = [sys.executable, "-c", EXPORT, str(checkpoint), str(tmp_path / "bundle")]
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    ran = {Path(line) for line in (tmp_path / "observed").read_text().splitlines()}
    used = {file for file in ran if ROOT in file.parents and file.relative_to(ROOT).parts[0] in PACKAGES}
    assert len(used) > 100 and not used - {*code_files(EXPORTS)}
