"""A folder of block files that several processes share, and that nobody else may write to."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgekv.cli import run
from edgekv.errors import EdgeKVWarning, PrefixError, UsageError
from edgekv.machine.private_file import read_private
from edgekv.prefix import (
    PrefixStore,
    RetentionPolicy,
    Snapshot,
    StoreConfig,
    TokenRangeRetentionConfig,
    remove_stored,
    stored_prefixes,
    table,
)
from edgekv.prefix.block import encode_block
from edgekv.prefix.keys import TOKEN_BYTES
from edgekv.prefix.table import INDEX, Row, Table, file_name
from tests.support.prefix_cases import (
    BLOCK_BYTES,
    GEOMETRY,
    LARGE,
    LONG,
    STEP,
    Tokens,
    audit,
    files,
    found,
    insert,
    opened,
    rows_of,
    saved,
    source,
    table_rows,
)

as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
SMALL = 2 * BLOCK_BYTES  # of memory, so that the disk is needed soon


def test_what_was_evicted_to_the_disk_comes_back(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=SMALL)
    for salt in "abc":
        insert(store, (1, 2, 3, 4), salt=salt)
    assert [found(store, (1, 2, 3, 4, 5), salt) for salt in "abc"] == [4, 4, 4]
    assert store.stats.disk.bytes_out > 0
    audit(tmp_path)


def test_a_new_store_finds_what_an_earlier_one_saved(tmp_path: Path) -> None:
    saved(tmp_path, salt="tenant")
    later = opened(tmp_path)
    assert found(later, LONG, "tenant") == len(LONG)
    assert found(later, (*LONG[:5], 77), "tenant") == 5
    assert found(later, LONG) == 0
    assert later.stats.rejected_files == 0


def test_a_block_that_is_not_full_survives_a_restart_and_makes_way_on_disk_too(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.insert(LONG[:5], source(LONG[:5]), ended=True)
    assert store.save() == 3
    later = opened(tmp_path)
    assert (found(later, LONG), later.stats.rejected_files) == (5, 0)
    insert(later, LONG[:6])
    assert later.save() == 3
    assert later.insert(LONG[:5], source(LONG[:5]), ended=True) == 5
    assert later.save() == 3
    audit(tmp_path)


def test_a_snapshot_survives_a_restart_and_a_damaged_one_is_rejected(tmp_path: Path) -> None:
    def reopened() -> PrefixStore:
        config = StoreConfig(tokens_per_block=4, max_bytes=LARGE, disk_folder=tmp_path)
        return PrefixStore(GEOMETRY, config, fingerprint="hybrid", snapshots=True)

    states = {"state": np.arange(4, dtype=np.int16)}
    store = reopened()
    for at in (4, 7):
        store.insert(LONG, source(LONG), snapshot=Snapshot(at, states))
    store.save()
    match = reopened().match(LONG[:8])
    assert match.tokens == 7 and match.states is not None
    np.testing.assert_array_equal(match.states.arrays["state"], states["state"])
    later = reopened()
    flip(
        next(
            tmp_path / file_name((row.key, row.part))
            for row in table_rows(tmp_path)
            if row.start + len(row.tokens) // TOKEN_BYTES == 7
        ),
        -1,
    )
    assert (later.match(LONG[:8]).tokens, later.stats.rejected_files) == (4, 1)
    audit(tmp_path)


def test_priorities_that_last_survive_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    insert(store, (7, 7), 90)
    policy = RetentionPolicy((TokenRangeRetentionConfig(0, None, 95, duration_ms=10**6),))
    store.insert((8, 8), source((8, 8)), retention=policy)
    store.save()
    size = max(files(tmp_path).values())
    assert opened(tmp_path, disk_cache_size=size).save() == 1
    later = opened(tmp_path)
    assert (found(later, (7, 7)), found(later, (8, 8))) == (2, 0)


def test_save_keeps_the_dearest_when_the_disk_is_small(tmp_path: Path) -> None:
    size = saved(tmp_path / "probe", (0, 0))[0].stat().st_size
    store = opened(tmp_path / "real", disk_cache_size=2 * size + 100)
    for token, priority in ((1, 40), (2, 90), (3, 35), (4, 60)):
        insert(store, (token, token), priority)
    assert store.save() == 2
    later = opened(tmp_path / "real")
    assert [found(later, (token, token)) for token in (1, 2, 3, 4)] == [0, 2, 0, 2]


def test_a_block_does_not_displace_the_one_that_it_needs(tmp_path: Path) -> None:
    size = saved(tmp_path / "probe", (0, 0))[0].stat().st_size
    store = opened(tmp_path / "real", disk_cache_size=size + 100)
    policy = RetentionPolicy((TokenRangeRetentionConfig(0, 2, 40), TokenRangeRetentionConfig(2, 4, 90)))
    store.insert((1, 2, 3, 4), source((1, 2, 3, 4)), retention=policy)
    assert store.save() == 1
    assert found(opened(tmp_path / "real"), (1, 2, 3, 4)) == 2
    audit(tmp_path / "real", size + 100)


def test_blocks_of_low_priority_are_not_written(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=SMALL)
    insert(store, (1, 2, 3, 4), 34)
    insert(store, (5, 6, 7, 8))
    assert (found(store, (1, 2)), store.stats.disk.blocks) == (0, 0)
    assert store.save() == 2


def test_the_statistics_of_the_disk_are_those_of_its_files(tmp_path: Path) -> None:
    store, other = opened(tmp_path), opened(tmp_path, fingerprint="other weights")
    insert(store, LONG)
    insert(other, (1, 2, 3, 4))
    assert (store.save(), other.save()) == (6, 2)
    stats = store.stats.disk, other.stats.disk
    assert [each.blocks for each in stats] == [6, 2]
    assert (
        sum(each.bytes_held for each in stats) == sum(each.bytes_in for each in stats) == sum(files(tmp_path).values())
    )


# ---------------------------------------------------------------------- damage


def flip(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit of the rows": lambda path: flip(path, -1),
    "a flipped bit of the header": lambda path: flip(path, 12),
    "a truncated file": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a file cut within the header": lambda path: path.write_bytes(path.read_bytes()[:50]),
    "an empty file": lambda path: path.write_bytes(b""),
    "a file that is too long": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "zeros of the same size": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("moment", ["before the store is opened", "after"])
def test_a_damaged_file_is_rejected_and_counted_and_never_used(tmp_path: Path, name: str, moment: str) -> None:
    last = saved(tmp_path)[-1]
    if moment == "after":
        store = opened(tmp_path)
        DAMAGE[name](last)
    else:
        DAMAGE[name](last)
        store = opened(tmp_path)
    assert found(store, LONG) == len(LONG) - STEP
    assert store.stats.rejected_files == 1
    assert not last.exists()
    insert(store, LONG)
    assert found(store, LONG) == len(LONG)
    store.save()
    assert found(opened(tmp_path), LONG) == len(LONG)
    audit(tmp_path)


def test_what_follows_a_damaged_file_is_found_again_with_it(tmp_path: Path) -> None:
    flip(saved(tmp_path)[1], -1)
    store = opened(tmp_path)
    assert (found(store, LONG), store.stats.disk.blocks) == (STEP, 5)
    insert(store, LONG[:4])
    assert (found(store, LONG), store.stats.blocks_inserted) == (len(LONG), 1)
    store.save()
    assert found(opened(tmp_path), LONG) == len(LONG)
    audit(tmp_path)


def test_a_file_under_another_blocks_name_is_rejected(tmp_path: Path) -> None:
    first, second, *_ = saved(tmp_path)
    shutil.copyfile(first, second)
    store = opened(tmp_path)
    assert found(store, LONG) == STEP
    assert store.stats.rejected_files == 1


FORGED: dict[str, dict[str, Any]] = {
    "no rows": {},
    "other names": {"other": rows_of((0, 1))},
    "a further array": {"rows": rows_of((0, 1)), "more": rows_of((0, 1))},
    "another type": {"rows": rows_of((0, 1)).astype(np.int16)},
    "fewer tokens": {"rows": rows_of((0,))},
    "more tensors": {"rows": np.concatenate([rows_of((0, 1))] * 2)},
    "one dimension": {"rows": rows_of((0, 1)).ravel()},
}


@pytest.mark.parametrize("name", FORGED)
def test_a_block_with_a_valid_checksum_and_other_arrays_is_rejected(tmp_path: Path, name: str) -> None:
    """As whoever can read the folder's secret can write it."""
    path = saved(tmp_path, (0, 1))[0]
    store = opened(tmp_path)
    (row,) = table_rows(tmp_path)
    content = encode_block((row.key, row.part), FORGED[name], store._keys)
    path.write_bytes(content)
    with sqlite3.connect(tmp_path / INDEX) as connection:
        connection.execute("UPDATE blocks SET size_bytes = ?", (len(content),))
    assert (found(store, (0, 1)), store.stats.rejected_files, path.exists()) == (0, 1, False)


def test_a_file_that_somebody_removed_is_a_miss(tmp_path: Path) -> None:
    names = saved(tmp_path)
    store = opened(tmp_path)
    names[2].unlink()
    assert found(store, LONG) == 2 * STEP
    assert store.stats.rejected_files == 0
    audit(tmp_path, whole=False)


def test_a_file_that_another_process_evicts_and_writes_again_while_it_is_read_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = saved(tmp_path, (0, 1))
    store, other = opened(tmp_path), opened(tmp_path)
    content, rows = path.read_bytes(), table_rows(tmp_path)
    assert found(other, (0, 1)) == 2

    def read_late(file: Path, limit_bytes: int) -> bytes:
        monkeypatch.undo()
        other._disk.drop(rows)
        with pytest.raises(FileNotFoundError):
            read_private(file, limit_bytes)
        for block in other._memory:
            block.is_saved = False
        assert other.save() == 1
        raise FileNotFoundError

    monkeypatch.setattr("edgekv.prefix.disk.read_private", read_late)
    assert (found(store, (0, 1)), store.stats.rejected_files) == (2, 0)
    assert (path.read_bytes(), table_rows(tmp_path)[0].key) == (content, rows[0].key)


def test_a_change_that_fails_leaves_what_another_process_has_written_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = opened(tmp_path), opened(tmp_path)
    for each in (store, other):
        insert(each, (0, 1))
    assert store._disk is not None
    put = store._disk._table.put

    def fail(row: Row) -> None:
        put(row)
        raise OSError(errno.EIO, "a disk that fails")

    original = Table.transaction
    monkeypatch.setattr(store._disk._table, "put", fail)

    @contextmanager
    def transaction(table: Table) -> Iterator[None]:
        try:
            with original(table):
                yield
        except OSError:
            monkeypatch.setattr(Table, "transaction", original)
            assert other.save() == 1
            raise

    monkeypatch.setattr(Table, "transaction", transaction)
    store.save()
    assert (store.stats.failed_writes, len(files(tmp_path))) == (1, 1)
    assert found(opened(tmp_path), (0, 1)) == 2


@pytest.mark.parametrize("damage", ["removed", "garbage", "a page", "a short secret"])
def test_a_damaged_table_is_an_empty_cache_and_said_once(tmp_path: Path, damage: str) -> None:
    saved(tmp_path)
    (tmp_path / "notes.txt").write_text("the user's own")
    index = tmp_path / INDEX
    raw = index.read_bytes()
    for path in tmp_path.glob(f"{INDEX}*"):
        path.unlink()
    if damage == "garbage":
        index.write_bytes(os.urandom(5000))
    elif damage != "removed":
        index.write_bytes(raw[:8192] + bytes(4096) + raw[12288:] if damage == "a page" else raw)
        if damage == "a short secret":
            with sqlite3.connect(index) as connection:
                connection.execute("UPDATE secret SET value = x'00'")
    if index.exists():
        index.chmod(0o600)
        with pytest.warns(EdgeKVWarning, match=r"blocks\.sqlite was damaged; the cache starts empty"):
            store = opened(tmp_path)
    else:
        store = opened(tmp_path)
    assert (found(store, LONG), files(tmp_path)) == (0, {})
    insert(store, LONG)
    assert store.save() == 6
    assert found(opened(tmp_path), LONG) == len(LONG)
    assert (tmp_path / "notes.txt").exists()
    audit(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("PRAGMA user_version = 4", "got a table of format 4; expected format 3. Use the edgekv that wrote it"),
        ("ALTER TABLE blocks ADD COLUMN more TEXT", "got a table of another program; expected format 3"),
        ("DROP TABLE blocks; PRAGMA user_version = 0", "got a table of another program; expected format 3"),
    ],
)
def test_a_table_of_another_version_is_refused_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    saved(tmp_path)
    with sqlite3.connect(tmp_path / INDEX) as connection:
        connection.executescript(f"PRAGMA journal_mode = DELETE; {change}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(PrefixError, match=message):
        opened(tmp_path)
    for words in (["ls", str(tmp_path)], ["rm", str(tmp_path), "--all"]):
        assert run(["prefix", *words]) != 0
        assert message in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_listing_changes_no_damaged_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path)
    (tmp_path / INDEX).write_bytes(b"garbage" * 999)
    before = files(tmp_path)
    for words in (["ls", str(tmp_path)], ["rm", str(tmp_path), "--all"]):
        assert run(["prefix", *words]) != 0
        assert "got a damaged table; expected a whole one" in capsys.readouterr().err
    assert (tmp_path / INDEX).read_bytes() == b"garbage" * 999 and files(tmp_path) == before


def test_a_block_that_cannot_be_read_now_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    store, before = opened(tmp_path), files(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many open files")))
        assert found(store, LONG) == 0
    assert files(tmp_path) == before and found(opened(tmp_path), LONG) == len(LONG)


def test_a_table_that_is_damaged_while_it_is_open_leaves_the_memory(tmp_path: Path) -> None:
    saved(tmp_path, tuple(range(50, 60)))
    store = opened(tmp_path)
    insert(store, LONG)
    with sqlite3.connect(tmp_path / INDEX) as connection:
        connection.execute("DROP TABLE blocks")
    with pytest.warns(EdgeKVWarning, match="memory alone is used") as caught:
        assert [found(store, LONG), found(store, (50, 51)), found(store, LONG)] == [12, 0, 12]
    assert len(caught) == 1
    store.save()
    assert store.stats.failed_writes == 1
    assert found(opened(tmp_path), LONG) == 0


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    names = saved(tmp_path)
    (tmp_path / f".{names[0].name}.partial-4194305").write_bytes(b"x")
    (tmp_path / f"{'0' * 32}-g0.safetensors").write_bytes(b"a file whose row was not written")
    names[-1].unlink()
    store = opened(tmp_path)
    audit(tmp_path)
    assert (found(store, LONG), store.stats.rejected_files) == (len(LONG) - STEP, 0)
    assert not list(tmp_path.glob(".*partial*"))


# ---------------------------------------------------------------------- several processes and models


def test_readers_of_the_table_do_not_wait_for_its_writer(tmp_path: Path) -> None:
    store = opened(tmp_path)
    insert(store, LONG)
    writer, reader = (sqlite3.connect(tmp_path / INDEX, isolation_level=None, timeout=0) for _ in range(2))
    writer.execute("BEGIN EXCLUSIVE")
    assert reader.execute("SELECT count(*) FROM blocks").fetchone() == (0,)
    writer.execute("ROLLBACK")
    assert store.save() == len(files(tmp_path)) == len(LONG) // STEP


def test_a_store_finds_what_another_saves_while_both_are_open(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    insert(one, LONG)
    assert found(other, LONG) == 0
    one.save()
    assert found(other, LONG) == len(LONG)
    insert(other, (7, 7, 7, 7))
    other.save()
    assert found(one, (7, 7, 7, 7)) == 4
    audit(tmp_path)


@pytest.mark.parametrize("change", [{"fingerprint": "other weights"}, {"tokens_per_block": 4}])
def test_models_and_layouts_share_a_folder_and_no_block(tmp_path: Path, change: dict[str, Any]) -> None:
    names = saved(tmp_path)
    other = opened(tmp_path, **change)
    assert (found(other, LONG), other.stats.rejected_files) == (0, 0)
    assert all(path.exists() for path in names)


def test_block_files_of_another_folder_are_not_used(tmp_path: Path) -> None:
    for path in saved(tmp_path / "one"):
        (tmp_path / "two").mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / "two")
    (tmp_path / "two" / "model.safetensors").write_bytes(b"somebody's weights")
    assert found(opened(tmp_path / "two"), LONG) == 0
    assert (tmp_path / "two" / "model.safetensors").exists()


def test_the_limit_is_that_of_the_folder(tmp_path: Path) -> None:
    """Two stores of different bundles, as two models with one --prefix-cache."""
    size = saved(tmp_path / "probe", (0, 0))[0].stat().st_size
    limit, folder = 4 * size + 100, tmp_path / "shared"
    stores = [opened(folder, name, disk_cache_size=limit) for name in ("a", "b")]
    for token in range(4):
        for store in stores:
            insert(store, (token, token))
            store.save()
            audit(folder, limit)
    assert len(files(folder)) == 4
    assert sum(store.stats.disk.evictions for store in stores) == 4
    assert [found(store, (3, 3)) for store in stores] == [2, 2]


def test_the_min_recently_used_file_of_any_process_goes_first(tmp_path: Path) -> None:
    size = saved(tmp_path / "probe", (0, 0))[0].stat().st_size
    folder, limit = tmp_path / "shared", 3 * size + 100
    one, other = (opened(folder, disk_cache_size=limit) for _ in range(2))
    for token in (1, 2, 3):
        insert(one, (token, token))
        one.save()
    assert found(other, (1, 1)) == 2  # the oldest file is the latest used one now
    insert(other, (4, 4))
    other.save()
    fresh = opened(folder, disk_cache_size=limit)
    assert [found(fresh, (token, token)) for token in (1, 2, 3, 4)] == [2, 0, 2, 2]


def test_the_last_use_of_all_processes_counts(tmp_path: Path) -> None:
    saved(tmp_path, (1, 1))
    one, other = opened(tmp_path), opened(tmp_path)
    assert (found(one, (1, 1)), found(other, (1, 1))) == (2, 2)
    other.save()
    (latest,) = table_rows(tmp_path)
    one.save()
    assert table_rows(tmp_path) == [latest]


def test_a_clock_that_was_set_back_does_not_evict_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = saved(tmp_path / "probe", (0, 0))[0].stat().st_size
    folder, limit = tmp_path / "shared", 2 * size + 100
    store = opened(folder, disk_cache_size=limit)
    for token in (1, 2):
        insert(store, (token, token))
        store.save()
    monkeypatch.setattr("edgekv.prefix.block.time_ns", lambda: 5)
    later = opened(folder, disk_cache_size=limit)
    insert(later, (3, 3))
    later.save()
    assert [found(opened(folder), (token, token)) for token in (1, 2, 3)] == [0, 2, 2]


WRITER = """
import sys
from pathlib import Path
from tests.support.prefix_cases import found, insert, opened
store = opened(Path(sys.argv[1]), disk_cache_size=int(sys.argv[3]))
for k in range(int(sys.argv[2]), 40, 4):
    tokens = (1, 2, 3, 4, k, k, k, k)
    insert(store, tokens)
    found(store, tokens)
    store.save()
"""


@pytest.mark.slow
def test_several_processes_keep_one_limit_and_one_truth(tmp_path: Path) -> None:
    limit = 40 * saved(tmp_path / "probe", (0, 0))[0].stat().st_size
    folder = tmp_path / "shared"
    command = [sys.executable, "-c", WRITER, str(folder)]
    writers = [subprocess.Popen([*command, str(k), str(limit)], cwd=Path(__file__).parents[3]) for k in range(4)]
    assert [writer.wait() for writer in writers] == [0, 0, 0, 0]
    audit(folder, limit)
    assert sum(files(folder).values()) > 0.9 * limit
    store = opened(folder)
    assert sum(found(store, (1, 2, 3, 4, k, k, k, k)) for k in range(40)) > 160
    assert store.stats.rejected_files == 0


def test_a_table_made_while_its_format_is_read_is_no_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two of the statements that read it."""
    monkeypatch.setattr(table, "_BUSY_S", 0.1)
    path = tmp_path / "blocks.sqlite"

    class Slow(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            found = super().execute(statement, *values)
            if statement != "COMMIT":
                with suppress(sqlite3.OperationalError):  # it waits for the reader
                    table._connect(path)[0].close()
            return found

    table._check_format(sqlite3.connect(path, isolation_level=None, factory=Slow), path)


def test_a_table_that_another_process_keeps_locked_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, (1, 2))
    monkeypatch.setattr(table, "_BUSY_S", 0.1)
    store = opened(tmp_path)
    insert(store, (5, 6))
    with sqlite3.connect(tmp_path / INDEX, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(PrefixError, match="a table that no other process is writing"):
            opened(tmp_path)
        store.save()
        assert (store.stats.failed_writes, found(store, (1, 2)), found(store, (5, 6))) == (1, 2, 2)
        other.execute("ROLLBACK")
    store.save()
    assert found(opened(tmp_path), (5, 6)) == 2


# ---------------------------------------------------------------------- a disk that refuses


@pytest.mark.parametrize("step", ["write_private", "put", "commit"])
def test_a_disk_that_fills_up_leaves_no_half_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Before the file, between the file and its row, and when the row is committed."""
    store = opened(tmp_path)
    insert(store, LONG[:4])
    store.save()
    insert(store, LONG)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if step == "write_private":
            patch.setattr("edgekv.prefix.disk.write_private", refuse)
        elif step == "put":
            patch.setattr(table.Table, "put", refuse)
        else:
            disk = store._disk
            assert disk is not None
            disk._table._connection.execute(
                "CREATE TEMP TRIGGER full AFTER INSERT ON main.blocks WHEN NEW.start > 6 "
                "BEGIN SELECT RAISE(ROLLBACK, 'database or disk is full'); END"
            )
        store.save()
        audit(tmp_path)
        assert (store.stats.failed_writes, found(store, LONG)) == (1, len(LONG))
        if step == "commit":
            disk._table._connection.execute("DROP TRIGGER full")
    assert not list(tmp_path.glob(".*partial*"))
    assert store.save() == 6
    assert found(opened(tmp_path), LONG) == len(LONG)


def test_a_folder_that_was_removed_is_a_miss(tmp_path: Path) -> None:
    saved(tmp_path / "store")
    store = opened(tmp_path / "store")
    shutil.rmtree(tmp_path / "store")
    assert found(store, LONG) == 0
    insert(store, (5, 6))
    store.save()
    assert found(store, (5, 6)) == 2


def test_nothing_needs_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Android, FAT and some network disks have none."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    saved(tmp_path)
    assert found(opened(tmp_path), LONG) == len(LONG)


# ---------------------------------------------------------------------- who may read and write it


def test_salts_are_nowhere_in_clear_and_names_differ_by_folder(tmp_path: Path) -> None:
    saved(tmp_path / "one", salt="hidden-salt")
    saved(tmp_path / "two", salt="hidden-salt")
    assert not files(tmp_path / "one").keys() & files(tmp_path / "two").keys()
    for path in tmp_path.rglob("*"):
        assert "hidden-salt" not in path.name
        assert path.is_dir() or b"hidden-salt" not in path.read_bytes()
    store = opened(tmp_path / "one")
    assert "hidden-salt" not in repr([vars(store), store.match(LONG, "hidden-salt"), store.stats])


def test_a_new_folder_and_its_parents_and_files_are_their_owner_s_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        saved(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    assert found(opened(tmp_path / "a" / "b"), LONG) == len(LONG)


@pytest.mark.parametrize("name", ["", INDEX])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "store"
    saved(folder)
    (folder / name).chmod(0o777)
    with pytest.raises(PrefixError, match=r"got open to other users \(mode 777\); .*chmod -R go-rwx"):
        opened(folder)


@as_root
@pytest.mark.parametrize("name", ["", INDEX])
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
        opened(folder)
    assert list(folder.iterdir()) == []


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    saved(folder)
    (folder / INDEX).rename(tmp_path / "elsewhere")
    (folder / INDEX).symlink_to(tmp_path / "elsewhere")
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
def test_a_block_that_another_user_could_have_written_is_rejected(tmp_path: Path, harm: object) -> None:
    assert callable(harm)
    last = saved(tmp_path / "store")[-1]
    harm(last)
    store = opened(tmp_path / "store")
    assert found(store, LONG) == len(LONG) - 2
    assert store.stats.rejected_files == 1
    assert not os.path.lexists(last)


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PrefixError, match=r"disk_folder .*file: got File exists; expected a writable folder"):
        opened(tmp_path / "file")


def test_a_folder_of_an_older_format_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").write_bytes(b"")
    with pytest.raises(PrefixError, match=r"got one of an older format; expected a new one\. Remove it"):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["index.sqlite"]


# ---------------------------------------------------------------------- listing and removing


@given(texts=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9).map(tuple), min_size=1, max_size=8))
def test_listed_sequences_have_the_files_that_only_they_need(texts: list[Tokens]) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        store = opened(folder, max_bytes=8 * LARGE)
        for text in texts:
            insert(store, text)
        store.save()
        store.close()
        blocks = {text[:end] for text in texts for end in range(2, len(text) + 1, 2)}
        ends = {block for block in blocks if not any(each != block and each[: len(block)] == block for each in blocks)}
        size = max(files(folder).values())
        alone = {
            end: sum(sum(other[:n] == end[:n] for other in ends) == 1 for n in range(2, len(end) + 1, 2))
            for end in ends
        }
        listed = stored_prefixes(folder)
        assert sorted((each.tokens, each.bytes, each.own_bytes) for each in listed) == sorted(
            (len(end), size * len(end) // 2, size * alone[end]) for end in ends
        )
        removed = remove_stored(folder, listed[0].id)
        assert removed == listed[:1]
        assert {each.id for each in stored_prefixes(folder)} >= {each.id for each in listed[1:]}
        audit(folder)
        assert sum(files(folder).values()) == size * len(blocks) - listed[0].own_bytes


def test_what_is_removed_leaves_the_total_of_a_store_that_is_open(tmp_path: Path) -> None:
    saved(tmp_path)
    store = opened(tmp_path)
    remove_stored(tmp_path, stored_prefixes(tmp_path)[0].id)
    assert files(tmp_path) == {} and store.stats.disk.blocks == 0
    assert found(store, LONG) == 0
    insert(store, (1, 2))
    assert store.save() == 1
    audit(tmp_path)


def test_all_sequences_are_removed_at_once(tmp_path: Path) -> None:
    for salt in "ab":
        saved(tmp_path, salt=salt)
    assert len(remove_stored(tmp_path, None)) == 2
    assert files(tmp_path) == {} and stored_prefixes(tmp_path) == []


def test_an_unknown_sequence_and_a_folder_without_any_are_named(tmp_path: Path) -> None:
    saved(tmp_path / "store")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"prefix: got 'zz'; expected the id of one\. See edgekv prefix ls"):
        remove_stored(tmp_path / "store", "zz")
    with pytest.raises(UsageError, match="got no prefixes; expected a folder of prefixes, or a bundle"):
        stored_prefixes(tmp_path / "empty")
    with pytest.raises(UsageError, match="got no folder"):
        stored_prefixes(tmp_path / "nothing")
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_listing_of_another_user_s_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path)
    tmp_path.chmod(0o777)
    assert run(["prefix", "ls", str(tmp_path)]) == 2
    assert "got open to other users (mode 777); expected a folder of your own" in capsys.readouterr().err


def test_a_row_that_says_that_its_file_is_huge_takes_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "block"
    file.write_bytes(b"rows")
    file.chmod(0o600)
    assert read_private(file, 1 << 60) == b"rows"
    assert read_private(file, 3) == b"row"
