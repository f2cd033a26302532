from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgekv.bundle import MANIFEST, atomic_directory, open_bundle
from edgekv.errors import BundleError, UsageError
from edgekv.machine import scratch
from edgekv.machine.scratch import atomic_file

BUILD_FOREVER = """
import sys, time
from edgekv.bundle import atomic_directory
with atomic_directory(sys.argv[1], force=True) as folder:
    (folder / "half").write_text("half")
    print(folder, flush=True)
    time.sleep(600)
"""

REPLACE_OFTEN = """
import sys
from edgekv.bundle import MANIFEST, atomic_directory
for _ in range(150):
    with atomic_directory(sys.argv[1], force=True) as folder:
        (folder / MANIFEST).write_text("whole")
"""


def _make(target: Path, content: str, *, force: bool = False) -> None:
    with atomic_directory(target, force=force) as folder:
        (folder / MANIFEST).write_text(content)
        assert folder.stat().st_dev == target.parent.stat().st_dev


def _killed_while_building(target: Path) -> Path:
    """The half folder of a process that was killed."""
    command = [sys.executable, "-c", BUILD_FOREVER, str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        partial = Path(child.stdout.readline().strip())
        child.send_signal(signal.SIGKILL)
    return partial


def _cut_off_swap(target: Path) -> Path:
    """What was at `target` until a process that replaced it was killed."""
    old = _killed_while_building(target).with_name("old")
    old.mkdir()
    (old / MANIFEST).write_text("old")
    return old


def test_the_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "bundle"
    with atomic_directory(target) as folder:
        (folder / "file").write_text("whole")
        assert not target.exists()
    assert (target / "file").read_text() == "whole"
    assert [path.name for path in target.parent.iterdir()] == ["bundle"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), atomic_directory(tmp_path / "bundle"):
        raise error
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_replaced_by_force_alone(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    _make(target, "old")
    with pytest.raises(UsageError, match=r"an existing folder.*--force"):
        _make(target, "new")
    _make(target, "new", force=True)
    assert (target / MANIFEST).read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_the_old_one_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    _make(target, "old")
    with pytest.raises(ValueError, match="no"), atomic_directory(target, force=True):
        raise ValueError("no")
    assert (target / MANIFEST).read_text() == "old"


def test_force_replaces_no_folder_of_another_kind(tmp_path: Path) -> None:
    target = tmp_path / "home"
    target.mkdir()
    (target / "letters").write_text("dear")
    with pytest.raises(UsageError, match=f"a folder without {MANIFEST}"):
        _make(target, "new", force=True)
    assert (target / "letters").read_text() == "dear"


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_text("a file")
    with pytest.raises(UsageError, match="got a file"):
        _make(tmp_path / "bundle", "new", force=True)
    with pytest.raises(BundleError, match="expected a writable folder"):
        _make(tmp_path / "bundle" / "within", "new")


def test_a_killed_process_leaves_the_old_one_and_its_rest_is_cleaned(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    _make(target, "old")
    partial = _killed_while_building(target)
    assert (partial / "half").exists()
    assert (target / MANIFEST).read_text() == "old"
    _make(target, "new", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_what_a_living_process_builds_is_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD_FOREVER, str(tmp_path / "bundle")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        partial = Path(child.stdout.readline().strip())
        _make(tmp_path / "bundle", "new")
        assert (partial / "half").exists()
        child.kill()


def test_a_swap_that_was_cut_off_is_taken_back(tmp_path: Path) -> None:
    _cut_off_swap(tmp_path / "bundle")
    with pytest.raises(UsageError, match="an existing folder"), atomic_directory(tmp_path / "bundle"):
        raise AssertionError("refused before anything is built")
    assert (tmp_path / "bundle" / MANIFEST).read_text() == "old"


def test_readers_are_told_where_the_old_one_is_after_a_swap_that_was_cut_off(tmp_path: Path) -> None:
    old = _cut_off_swap(tmp_path / "bundle")
    with pytest.raises(BundleError, match=rf"was killed.*The one before is whole: mv {old} \S*/bundle"):
        open_bundle(tmp_path / "bundle")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.EIO, "Input/output error")])
def test_the_old_one_is_put_back_when_the_new_one_cannot_be_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    target, replace = tmp_path / "bundle", Path.replace
    _make(target, "old")

    def fails(self: Path, to: str | Path) -> Path:
        if self.name == "new":
            raise error
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises((KeyboardInterrupt, OSError)):
        _make(target, "new", force=True)
    assert (target / MANIFEST).read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_what_cannot_be_put_back_stays_for_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, replace = tmp_path / "bundle", Path.replace
    _make(target, "old")

    def fails(self: Path, to: str | Path) -> Path:
        if to == target:
            raise OSError(errno.EIO, "Input/output error")
        return replace(self, to)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Input/output"):
        patched.setattr(Path, "replace", fails)
        _make(target, "new", force=True)
    assert not target.exists()
    _make(target, "new", force=True)
    assert (target / MANIFEST).read_text() == "new" and [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_processes_that_replace_one_folder_at_once_do_not_fail(tmp_path: Path) -> None:
    command = [sys.executable, "-c", REPLACE_OFTEN, str(tmp_path / "bundle")]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [child.communicate(timeout=120)[1] for child in running] == ["", "", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert {path.name for path in (tmp_path / "bundle").iterdir()} == {MANIFEST}


def test_one_process_builds_a_folder_once_at_a_time(tmp_path: Path) -> None:
    with (
        atomic_directory(tmp_path / "bundle"),
        pytest.raises(ValueError, match="being written by this process"),
        atomic_directory(tmp_path / "bundle"),
    ):
        pass


def test_folders_are_not_flushed_where_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows opens no folder; some file systems refuse to flush one."""
    flushed: list[bool] = []

    def fsync(descriptor: int) -> None:
        flushed.append(os.path.isdir(f"/proc/self/fd/{descriptor}"))  # noqa: PTH112
        if flushed[-1]:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    _make(tmp_path / "linux", "whole")
    assert True in flushed and False in flushed
    flushed.clear()
    monkeypatch.setattr(scratch, "_on_windows", lambda: True)
    _make(tmp_path / "windows", "whole")
    assert flushed == [False]


def test_a_file_that_cannot_be_flushed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        _make(tmp_path / "bundle", "whole")
    assert not list(tmp_path.iterdir())


def test_the_rest_of_a_killed_process_is_removed_with_the_next_file(tmp_path: Path) -> None:
    write = "import sys, time; from edgekv.machine.scratch import atomic_file\nfrom pathlib import Path\n"
    write += "with atomic_file(Path(sys.argv[1])) as file: file.write_text('half'); print(flush=True); time.sleep(600)"
    target = tmp_path / "file.bin"
    with subprocess.Popen([sys.executable, "-c", write, str(target)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with atomic_file(target) as partial:
            partial.write_text("whole")
        assert len([*tmp_path.iterdir()]) == 2, "what a living process writes is left alone"
        child.kill()
    with atomic_file(target) as partial:
        partial.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]


def test_a_folder_that_comes_and_goes_during_a_swap_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, replace, left = tmp_path / "bundle", Path.replace, [2]

    def met(self: Path, to: str | Path) -> Path:
        if Path(to) == target and left[0]:
            left[0] -= 1  # another process had put one there, and has removed it since
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(self), None, str(to))
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", met)
    _make(target, "whole", force=True)
    assert (target / MANIFEST).read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
