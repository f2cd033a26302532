"""What is released: two builds have the same bytes, and hold what they should."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

import edgekv

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
BESIDE = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]


def build(source: Path, folder: Path) -> dict[str, Path]:
    """The sdist and the wheel of a source tree, by suffix."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.suffix: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(ROOT, tmp_path_factory.mktemp("built"))


@pytest.mark.slow
def test_a_second_build_elsewhere_has_the_same_bytes(built: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", ".gitignore", *BESIDE):
        source = ROOT / name
        shutil.copytree(source, copy / name) if source.is_dir() else shutil.copyfile(source, copy / name)
    for path in copy.rglob("*"):
        os.utime(path, (time.time(), time.time()))
    again = build(copy, tmp_path / "again")
    assert {name: path.read_bytes() for name, path in built.items()} == {n: p.read_bytes() for n, p in again.items()}


@pytest.mark.slow
def test_both_hold_every_file_of_the_packages(built: dict[str, Path]) -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(built[".whl"]) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == files
    with tarfile.open(built[".gz"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert files < names and {"CHANGELOG.md", "LICENSE", "README.md"} < names


@pytest.mark.slow
def test_twine_accepts_them(built: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.values())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_version_is_the_same_everywhere() -> None:
    version = PROJECT["project"]["version"]
    assert edgekv.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## .*\b" + re.escape(version) + r"\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_actions_are_pinned_by_commit() -> None:
    workflows = [*(ROOT / ".github" / "workflows").glob("*.yml")]
    used = [line for path in workflows for line in path.read_text().splitlines() if "uses:" in line]
    assert used and not [line for line in used if not re.search(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)]
