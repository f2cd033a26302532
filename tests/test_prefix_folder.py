"""A folder of block files that several processes share, and that nobody else may write to."""

from __future__ import annotations

import errno
import os
import runpy
import sqlite3
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.prefix import PrefixError, PrefixStore, catalogue, lock
from edgekv.prefix.blockfile import decode
from edgekv.prefix.catalogue import INDEX
from edgekv.prefix.folder import remove_stored, stored_prefixes
from tests.test_prefix_disk import LONG, found, killed_sequence, killed_store, opened, saved
from tests.test_prefix_model import BLOCK_BYTES, audit, rows_of

LARGE = 32 * BLOCK_BYTES
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")


def listed(folder: Path) -> dict[str, int]:
    """Names and sizes that the index lists."""
    with sqlite3.connect(folder / INDEX) as connection:
        return dict(connection.execute("SELECT name, bytes FROM blocks"))


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.rglob("*.safetensors")}


def test_a_store_finds_what_another_saves_while_both_are_open(tmp_path: Path) -> None:
    one, other = opened(tmp_path, max_bytes=LARGE), opened(tmp_path, max_bytes=LARGE)
    one.insert(LONG, rows_of(LONG))
    assert found(other, LONG) == 0
    one.save()
    assert found(other, LONG) == len(LONG)
    other.insert((7, 7, 7, 7), rows_of((7, 7, 7, 7)))
    other.save()
    assert found(one, (7, 7, 7, 7)) == 4
    for store in (one, other):
        audit(store, [])


def test_the_limit_is_that_of_the_folder(tmp_path: Path) -> None:
    """Two stores of different bundles below one folder, as two models with one --prefix-cache."""
    size = saved(tmp_path / "probe", (0, 0))[0].stat().st_size
    folder = tmp_path / "shared"
    changes = {"disk_limit_folder": folder, "disk_cache_size": 4 * size + 100, "max_bytes": LARGE}
    stores = [opened(folder / name, fingerprint=name, **changes) for name in ("a", "b")]
    for token in range(4):
        for store in stores:
            store.insert((token, token), rows_of((token, token)))
            store.save()
            assert sum(files(folder).values()) <= 4 * size + 100
    assert files(folder) == listed(folder)


def test_the_least_recently_used_file_of_any_process_goes_first(tmp_path: Path) -> None:
    size = saved(tmp_path / "probe", (0, 0))[0].stat().st_size
    folder, limit = tmp_path / "shared", 3 * size + 100
    one = opened(folder, max_bytes=LARGE, disk_cache_size=limit)
    other = opened(folder, max_bytes=LARGE, disk_cache_size=limit)
    for token in (1, 2, 3):
        one.insert((token, token), rows_of((token, token)))
        one.save()
    assert found(other, (1, 1)) == 2  # the oldest file is the latest used one now
    other.insert((4, 4), rows_of((4, 4)))
    other.save()
    fresh = opened(folder, max_bytes=LARGE, disk_cache_size=limit)
    assert [found(fresh, (token, token)) for token in (1, 2, 3, 4)] == [2, 0, 2, 2]


WRITER = """
import sys
from pathlib import Path
from tests.test_prefix_disk import killed_sequence, killed_store, rows_of, KILLED_GEOMETRY
store = killed_store(Path(sys.argv[1]))
for k in range(int(sys.argv[2]), 40, 4):
    tokens = killed_sequence(k)
    store.insert(tokens, rows_of(tokens, None, KILLED_GEOMETRY))
    match = store.match(tokens)
    store.fetch(match)
    store.release(match)
    store.save()
"""


@pytest.mark.slow
def test_several_processes_keep_one_limit_and_one_truth(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    root = Path(__file__).parent.parent
    writers = [subprocess.Popen([*command, str(k)], cwd=root) for k in range(4)]
    assert [writer.wait() for writer in writers] == [0, 0, 0, 0]
    store = killed_store(tmp_path)
    limit = store.config.disk_cache_size
    assert files(tmp_path) == listed(tmp_path)
    assert 0.9 * limit <= sum(files(tmp_path).values()) <= limit
    reused = 0
    for k in range(40):
        tokens = killed_sequence(k)
        match = store.match(tokens)
        np.testing.assert_array_equal(store.fetch(match), rows_of(tokens[: match.tokens], None, store.geometry))
        reused += match.tokens
        store.release(match)
    assert reused > 0
    assert store.stats.rejected_files == 0
    audit(store, [])


@pytest.mark.parametrize("damage", ["removed", "garbage", "empty", "another table"])
def test_the_index_is_made_again_from_the_files(tmp_path: Path, damage: str) -> None:
    saved(tmp_path)
    index = tmp_path / INDEX
    for path in tmp_path.glob(f"{INDEX}*"):
        path.unlink()
    if damage == "garbage":
        index.write_bytes(os.urandom(5000))
    elif damage == "empty":
        index.write_bytes(b"")
    elif damage == "another table":
        with sqlite3.connect(index) as connection:
            connection.execute("CREATE TABLE blocks (name TEXT)")
    if index.exists():
        index.chmod(0o600)
    store = opened(tmp_path, max_bytes=LARGE)
    assert (found(store, LONG), store.stats.rejected_files) == (len(LONG), 0)
    assert files(tmp_path) == listed(tmp_path)
    audit(store, [])


def test_entries_without_files_are_dropped(tmp_path: Path) -> None:
    saved(tmp_path)[-1].unlink()
    store = opened(tmp_path, max_bytes=LARGE)
    assert (found(store, LONG), store.stats.rejected_files) == (len(LONG) - 2, 0)
    assert files(tmp_path) == listed(tmp_path)


def test_nothing_needs_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Android, FAT and some network disks have none."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    saved(tmp_path)
    assert found(opened(tmp_path, max_bytes=LARGE), LONG) == len(LONG)


def test_files_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        folder = tmp_path / "store"
        saved(folder)
    finally:
        os.umask(previous)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o077 for path in folder.iterdir()} == dict.fromkeys(
        (path.name for path in folder.iterdir()), 0
    )


@pytest.mark.parametrize("name", ["", "store.key", INDEX])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "store"
    saved(folder)
    (folder / name).chmod(0o777)
    with pytest.raises(PrefixError, match=r"got open to other users \(mode 777\); .*chmod -R go-rwx"):
        opened(folder)


@as_root
@pytest.mark.parametrize("name", ["", "store.key", INDEX])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "store"
    saved(folder)
    os.chown(folder / name, 12345, 12345)
    with pytest.raises(PrefixError, match="got owned by user 12345; expected a file or folder that only you can write"):
        opened(folder)


@as_root
def test_nothing_is_written_into_a_folder_of_another_user(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(PrefixError, match="got owned by user 12345"):
        opened(folder / "a", disk_limit_folder=folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["store.key", INDEX])
def test_a_symbolic_link_is_not_followed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "store"
    saved(folder)
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PrefixError, match="got a symbolic link"):
        opened(folder)


def linked(path: Path) -> None:
    moved = path.parent.parent / "elsewhere"
    path.rename(moved)
    path.symlink_to(moved)


def given_away(path: Path) -> None:
    os.chown(path, 12345, 12345)


def replaced_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "harm", [linked, pytest.param(given_away, marks=as_root), lambda path: path.chmod(0o666), replaced_by_a_pipe]
)
@pytest.mark.parametrize("moment", ["before the store is opened", "after"])
def test_a_block_that_another_user_could_have_written_is_rejected(tmp_path: Path, harm: object, moment: str) -> None:
    assert callable(harm)
    last = saved(tmp_path / "store")[-1]
    if moment == "after":
        store = opened(tmp_path / "store", max_bytes=LARGE)
        harm(last)
    else:
        harm(last)
        store = opened(tmp_path / "store", max_bytes=LARGE)
    assert found(store, LONG) == len(LONG) - 2
    assert store.stats.rejected_files == 1
    assert not os.path.lexists(last)


def test_a_public_sequence_is_found_under_any_salt(tmp_path: Path) -> None:
    """Only the tokens of the public sequence: what others stored without a salt stays theirs."""
    store: PrefixStore = opened(tmp_path, max_bytes=LARGE)
    public, private = LONG[:6], (*LONG[:4], 50, 51, 52, 53)
    store.insert(public, rows_of(public), public=True)
    store.insert(private, rows_of(private))
    for salt, tokens, expected in [
        (None, LONG, 6),
        ("tenant", LONG, 6),
        ("tenant", private, 4),
        (None, private, len(private)),
    ]:
        match = store.match(tokens, salt)
        assert match.tokens == expected
        np.testing.assert_array_equal(store.fetch(match), rows_of(tokens[:expected]))
        store.release(match)
    store.insert(LONG, rows_of(LONG, "tenant"), salt="tenant")
    assert found(store, LONG, "tenant") == len(LONG)
    audit(store, [])


def test_a_lock_on_windows_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a call waits for ten seconds only."""
    answers = [OSError(errno.EDEADLK, "Resource deadlock avoided")] * 2 + [None]

    def locking(descriptor: int, mode: int, size_bytes: int) -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_LOCK=1, locking=locking))
    monkeypatch.setattr(sys, "platform", "win32")
    locked = runpy.run_path(str(Path(lock.__file__)))["locked"]
    with locked(tmp_path / ".lock"):
        assert answers == []
    answers.append(OSError(errno.EACCES, "Permission denied"))
    with pytest.raises(PermissionError), locked(tmp_path / ".lock"):
        pass


def test_a_new_folder_and_its_parents_are_their_owner_s_alone(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        saved(tmp_path / "a" / "b" / "c", (1, 2))
    finally:
        os.umask(before)
    for folder in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert found(opened(tmp_path / "a" / "b" / "c"), (1, 2)) == 2


def test_a_lock_that_is_held_for_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_LONGEST_WAIT_S", 0.1)
    with lock.locked(tmp_path / "lock"):
        with pytest.raises(OSError, match="another process holds its lock") as caught, lock.locked(tmp_path / "lock"):
            pass
        assert caught.value.errno == errno.EAGAIN
    with lock.locked(tmp_path / "lock"):
        pass


@given(texts=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9).map(tuple), min_size=1, max_size=8))
def test_listed_sequences_have_the_files_that_only_they_need(texts: list[tuple[int, ...]]) -> None:
    with TemporaryDirectory() as name:
        store = opened(Path(name), max_bytes=LARGE * 8)
        for text in texts:
            store.insert(text, rows_of(text))
        store.save()
        store.close()
        blocks = {text[:end] for text in texts for end in range(2, len(text) + 1, 2)}
        ends = {block for block in blocks if not any(each != block and each[: len(block)] == block for each in blocks)}
        listed = stored_prefixes(Path(name))
        assert sorted(each.tokens for each in listed) == sorted(map(len, ends))
        sizes = files(Path(name))
        alone = [block for block in blocks if sum(end[: len(block)] == block for end in ends) == 1]
        assert sum(sizes.values()) - sum(each.own_bytes for each in listed) == sum(
            path.stat().st_size
            for path in Path(name).glob("*.safetensors")
            if decode(path.read_bytes()).record.tokens not in alone
        )


@pytest.mark.parametrize("home", [".", "model"])
def test_what_is_removed_leaves_the_total_of_a_store_that_is_open(tmp_path: Path, home: str) -> None:
    changes = {"disk_limit_folder": tmp_path} if home != "." else {}
    saved(tmp_path / home, LONG)
    store = opened(tmp_path / home, max_bytes=LARGE, **changes)
    assert listed(tmp_path)
    remove_stored(tmp_path, stored_prefixes(tmp_path)[0].id)
    assert listed(tmp_path) == files(tmp_path) == {}
    assert found(store, LONG) == 0
    store.insert((1, 2), rows_of((1, 2)))
    store.save()
    assert listed(tmp_path) == files(tmp_path) and found(store, (1, 2)) == 2


def test_an_index_that_another_process_is_making_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, (1, 2))
    monkeypatch.setattr(catalogue, "_BUSY_S", 0.1)
    with sqlite3.connect(tmp_path / INDEX, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(PrefixError, match="an index that no other process is making"):
            opened(tmp_path)
        other.execute("ROLLBACK")
    assert found(opened(tmp_path), (1, 2)) == 2
