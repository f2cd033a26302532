from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from edgekv.machine import scratch
from edgekv.machine.scratch import atomic_file, held_folder, is_held, remove_abandoned, scratch_folder
from tests.support.processes import left_by_a_killed_process

CLEAN = "import sys; from pathlib import Path; from edgekv.machine.scratch import remove_abandoned\n"
CLEAN += "remove_abandoned(Path(sys.argv[1])); print(len([*Path(sys.argv[1]).iterdir()]))"
CONTAINER = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc"]


def _is_possible(command: list[str]) -> bool:
    try:
        return subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not _is_possible(CONTAINER), reason="this system gives no process namespaces")
def test_containers_leave_each_others_folders_alone(tmp_path: Path) -> None:
    """In another namespace no process has this one's id."""
    command = [*CONTAINER, sys.executable, "-c", CLEAN, str(tmp_path)]
    with held_folder(tmp_path, ".partial") as folder:
        (folder / "half").touch()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == "1\n" and (folder / "half").exists()
    left_by_a_killed_process(tmp_path, ".partial")
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"


def test_a_folder_is_held_until_its_block_ends(tmp_path: Path) -> None:
    with held_folder(tmp_path, ".a") as folder:
        assert is_held(folder) and folder.name.startswith(".a-")
        remove_abandoned(tmp_path)
        assert folder.is_dir()
    assert not is_held(folder) and not [*tmp_path.iterdir()]


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    left, other = (left_by_a_killed_process(tmp_path, prefix) for prefix in (".a.partial", ".b.partial"))
    (left / "half").mkdir()
    (left / "half" / "file").touch()
    assert not is_held(left)
    with atomic_file(tmp_path / "a") as partial:
        partial.touch()
    assert {path.name for path in tmp_path.iterdir()} == {"a", other.name}


def test_folders_of_other_programs_stay(tmp_path: Path) -> None:
    names = ["edgekv-notes", "edgekv-a-x-y", f"edgekv-a-01234567-{'0' * 15}", f"edgekv-a-01234567-{'f' * 16}"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / names[-1] / "notes").touch()  # named like ours, but without a lock
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


@pytest.mark.parametrize(("kind", "stays"), [("nfs4", True), ("cifs", True), ("fuse.sshfs", True), ("ext4", False)])
def test_a_folder_of_another_machine_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stays: bool
) -> None:
    """Not every shared file system passes locks on. On a disk of this machine it is from before a restart."""
    shared = tmp_path / "a disk"
    shared.mkdir()
    left = left_by_a_killed_process(shared, ".partial")
    (tmp_path / "boot_id").write_text("another machine")
    place = str(shared).replace(" ", r"\040")
    (tmp_path / "mounts").write_text(f"1 0 8:1 / / rw - ext4 disk rw\n2 1 0:2 / {place} rw shared:1 - {kind} far rw\n")
    monkeypatch.setattr(scratch, "_BOOT", tmp_path / "boot_id")
    monkeypatch.setattr(scratch, "_MOUNTS", tmp_path / "mounts")
    scratch._system.cache_clear()
    remove_abandoned(shared)
    monkeypatch.undo()
    scratch._system.cache_clear()
    assert left.exists() == stays
    remove_abandoned(shared)
    assert not left.exists()


def test_where_there_are_no_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = left_by_a_killed_process(tmp_path, ".a.partial")

    def flock(lock: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with atomic_file(tmp_path / "a") as partial:
        partial.touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a", left.name])


def test_a_folder_that_is_taken_away_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, made = Path.mkdir, []

    def taken_away(self: Path, *args: int, **options: bool) -> None:
        mkdir(self, *args, **options)
        made.append(self)
        if len(made) == 1:
            remove_abandoned(tmp_path)

    monkeypatch.setattr(Path, "mkdir", taken_away)
    with held_folder(tmp_path, ".a") as folder:
        assert [*tmp_path.iterdir()] == [folder] == made[1:]


def test_scratch_folders_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch_folder("test") as folder:
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("flush", [True, False])
def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: bool
) -> None:
    """Otherwise a power cut may leave an empty one in place of the one before."""
    flushed: list[list[str]] = []
    monkeypatch.setattr("os.fsync", lambda _: flushed.append([path.name for path in tmp_path.iterdir()]))
    with atomic_file(tmp_path / "a", flush=flush) as partial:
        partial.touch()
    assert len(flushed) == 2 * flush and "a" not in (flushed or [[]])[0]
