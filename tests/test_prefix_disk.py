from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgekv.kv import Geometry
from edgekv.prefix import Match, PrefixError, PrefixStore, RetentionPolicy, StoreConfig, TokenRangeRetentionConfig
from tests.test_prefix_model import BLOCK_BYTES, GEOMETRY, SALTS, STEP, TOKENS, Tokens, audit, rows_of

LONG = tuple(range(12))


def opened(folder: Path, fingerprint: str = "weights", **changes: object) -> PrefixStore:
    """A store of two blocks of memory, so that the disk is needed soon."""
    given = {"tokens_per_block": STEP, "max_bytes": 2 * BLOCK_BYTES, "disk_folder": folder}
    return PrefixStore(GEOMETRY, StoreConfig(**{**given, **changes}), fingerprint=fingerprint)  # type: ignore[arg-type]


def found(store: PrefixStore, tokens: Tokens, salt: str | None = None) -> int:
    """The length of a match, whose rows are checked."""
    match = store.match(tokens, salt)
    np.testing.assert_array_equal(store.fetch(match), rows_of(tokens[: match.tokens], salt))
    store.release(match)
    return match.tokens


def saved(folder: Path, tokens: Tokens = LONG, salt: str | None = None) -> list[Path]:
    """The files of a sequence, written by a store that is gone; the order is that of the sequence."""
    store = opened(folder, max_bytes=32 * BLOCK_BYTES)
    store.insert(tokens, rows_of(tokens, salt), salt=salt)
    assert store.save() == len(tokens) // STEP
    return sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)


def test_what_was_evicted_to_the_disk_comes_back(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for salt in "abc":
        store.insert((1, 2, 3, 4), rows_of((1, 2, 3, 4), salt), salt=salt)
    assert [found(store, (1, 2, 3, 4, 5), salt) for salt in "abc"] == [4, 4, 4]
    assert store.stats.disk.bytes_out > 0
    audit(store, [])


def test_a_new_store_finds_what_an_earlier_one_saved(tmp_path: Path) -> None:
    saved(tmp_path, salt="tenant")
    later = opened(tmp_path, max_bytes=32 * BLOCK_BYTES)
    assert found(later, LONG, "tenant") == len(LONG)
    assert found(later, (*LONG[:5], 77), "tenant") == 5
    assert found(later, LONG) == 0
    assert later.stats.rejected_files == 0


def test_a_block_that_is_not_full_survives_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=32 * BLOCK_BYTES)
    store.insert(LONG[:5], rows_of(LONG[:5]), ended=True)
    assert store.save() == 3
    later = opened(tmp_path, max_bytes=32 * BLOCK_BYTES)
    assert (found(later, LONG), later.stats.rejected_files) == (5, 0)


def test_priorities_that_last_survive_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    policy = RetentionPolicy((TokenRangeRetentionConfig(0, None, 90),))
    store.insert((7, 7), rows_of((7, 7)), retention=policy)
    store.insert((8, 8), rows_of((8, 8)))
    store.save()
    size = next(tmp_path.glob("*.safetensors")).stat().st_size
    later = opened(tmp_path, disk_cache_size=size)
    assert (found(later, (7, 7)), found(later, (8, 8))) == (2, 0)


def test_save_keeps_the_dearest_when_the_disk_is_small(tmp_path: Path) -> None:
    size = saved(tmp_path / "probe", (0, 0))[0].stat().st_size
    store = opened(tmp_path / "real", max_bytes=8 * BLOCK_BYTES, disk_cache_size=2 * size + 100)
    for token, priority in ((1, 40), (2, 90), (3, 35), (4, 60)):
        policy = RetentionPolicy((TokenRangeRetentionConfig(0, None, priority),))
        store.insert((token, token), rows_of((token, token)), retention=policy)
    assert store.save() == 2
    later = opened(tmp_path / "real", max_bytes=8 * BLOCK_BYTES)
    assert [found(later, (token, token)) for token in (1, 2, 3, 4)] == [0, 2, 0, 2]


def test_blocks_of_low_priority_are_not_offloaded(tmp_path: Path) -> None:
    store = opened(tmp_path)
    policy = RetentionPolicy((TokenRangeRetentionConfig(0, None, 34),))
    store.insert((1, 2, 3, 4), rows_of((1, 2, 3, 4)), retention=policy)
    store.insert((5, 6, 7, 8), rows_of((5, 6, 7, 8)))
    assert (found(store, (1, 2)), store.stats.disk.blocks) == (0, 0)
    assert store.save() == 2


def flip(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit of the rows": lambda path: flip(path, -1 - 8 * len(LONG)),
    "a flipped bit at the end": lambda path: flip(path, -1),
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
        store = opened(tmp_path, max_bytes=32 * BLOCK_BYTES)
        DAMAGE[name](last)
    else:
        DAMAGE[name](last)
        store = opened(tmp_path, max_bytes=32 * BLOCK_BYTES)
    assert found(store, LONG) == len(LONG) - STEP
    assert store.stats.rejected_files == 1
    assert not last.exists()
    store.insert(LONG, rows_of(LONG))
    assert found(store, LONG) == len(LONG)
    store.save()
    assert found(opened(tmp_path, max_bytes=32 * BLOCK_BYTES), LONG) == len(LONG)
    audit(store, [])


def test_what_follows_a_damaged_file_is_not_used_either(tmp_path: Path) -> None:
    flip(saved(tmp_path)[1], -1)
    store = opened(tmp_path, max_bytes=32 * BLOCK_BYTES)
    assert found(store, LONG) == STEP
    audit(store, [])
    assert store.stats.disk.blocks == 1


def test_a_file_under_another_blocks_name_is_rejected(tmp_path: Path) -> None:
    first, second, *_ = saved(tmp_path)
    shutil.copyfile(first, second)
    store = opened(tmp_path, max_bytes=32 * BLOCK_BYTES)
    assert found(store, LONG) == STEP
    assert store.stats.rejected_files >= 1


def test_files_of_another_fingerprint_or_folder_are_left_alone_and_never_used(tmp_path: Path) -> None:
    files = saved(tmp_path / "one")
    other = opened(tmp_path / "one", fingerprint="other weights")
    assert (found(other, LONG), other.stats.rejected_files) == (0, len(files))
    assert all(path.exists() for path in files)
    (tmp_path / "two").mkdir()
    for path in files:
        shutil.copy(path, tmp_path / "two")
    (tmp_path / "two" / "model.safetensors").write_bytes(b"somebody's weights")
    stranger = opened(tmp_path / "two")
    assert (found(stranger, LONG), stranger.stats.rejected_files) == (0, len(files) + 1)
    assert (tmp_path / "two" / "model.safetensors").exists()


def test_files_of_another_layout_are_foreign(tmp_path: Path) -> None:
    files = saved(tmp_path)
    assert opened(tmp_path, tokens_per_block=4, max_bytes=1 << 12).stats.rejected_files == len(files)


def test_a_file_that_somebody_removed_is_a_miss(tmp_path: Path) -> None:
    files = saved(tmp_path)
    store = opened(tmp_path, max_bytes=32 * BLOCK_BYTES)
    files[2].unlink()
    assert found(store, LONG) == 2 * STEP
    assert store.stats.rejected_files == 0
    audit(store, [])


def test_salts_and_tokens_are_nowhere_in_clear(tmp_path: Path) -> None:
    for path in saved(tmp_path, salt="hidden-salt"):
        assert "hidden-salt" not in path.name
        assert b"hidden-salt" not in path.read_bytes()
    names = {path.name for path in tmp_path.glob("*.safetensors")}
    saved(tmp_path / "other", salt="hidden-salt")
    assert not names & {path.name for path in (tmp_path / "other").iterdir()}
    store = opened(tmp_path)
    assert "hidden-salt" not in repr([vars(store), store.match(LONG, "hidden-salt"), store.stats])


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PrefixError, match=r"disk_folder .*file: got File exists; expected a writable folder"):
        opened(tmp_path / "file")


def test_a_broken_secret_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "store.key").write_bytes(b"short")
    with pytest.raises(PrefixError, match=r"store.key: got 5 bytes; expected 32 bytes"):
        opened(tmp_path)


KILLED_GEOMETRY = Geometry(layers=4, kv_heads=4, head_dim=64, context=256)
KILLED_STEP = 16
CHILD = """
import sys
from pathlib import Path
from tests.test_prefix_disk import killed_sequence, killed_store, rows_of, KILLED_GEOMETRY
store = killed_store(Path(sys.argv[1]))
k = 0
while True:
    tokens = killed_sequence(k)
    store.insert(tokens, rows_of(tokens, None, KILLED_GEOMETRY))
    k = (k + 1) % 40
"""


def killed_store(folder: Path) -> PrefixStore:
    block = KILLED_STEP * KILLED_GEOMETRY.tensors * KILLED_GEOMETRY.row_bytes
    config = StoreConfig(
        tokens_per_block=KILLED_STEP,
        max_bytes=6 * block,
        disk_folder=folder,
        disk_cache_size=60 * (block + 2048),
    )
    return PrefixStore(KILLED_GEOMETRY, config, fingerprint="weights")


def killed_sequence(k: int) -> Tokens:
    return tuple(range(KILLED_STEP)) + tuple(k * 100 + i for i in range(3 * KILLED_STEP))


@pytest.mark.slow
def test_kill_during_offload_never_leaves_a_wrong_block(tmp_path: Path) -> None:
    pause = random.Random(0)
    for _ in range(5):
        before = time.time_ns()
        with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], cwd=Path(__file__).parent.parent) as child:
            try:
                while latest_ns(tmp_path) <= before:
                    assert child.poll() is None
                time.sleep(pause.uniform(0, 0.1))
            finally:
                os.kill(child.pid, signal.SIGKILL)
        store = killed_store(tmp_path)
        assert not list(tmp_path.glob(".*partial*"))
        reused = 0
        for k in range(40):
            tokens = killed_sequence(k)
            match = store.match(tokens)
            np.testing.assert_array_equal(store.fetch(match), rows_of(tokens[: match.tokens], None, KILLED_GEOMETRY))
            reused += match.tokens
            store.release(match)
        assert reused > 0
        assert store.stats.rejected_files == 0
        audit(store, [])


def latest_ns(folder: Path) -> int:
    """When the last block file was written, while another process writes and removes them."""
    latest = 0
    for path in folder.glob("*.safetensors"):
        with suppress(FileNotFoundError):
            latest = max(latest, path.stat().st_mtime_ns)
    return latest


def test_remnants_of_a_killed_writer_are_cleared_away(tmp_path: Path) -> None:
    files = saved(tmp_path)
    remnant = tmp_path / f".{files[0].name}.partial-{2**22 + 1}"
    remnant.write_bytes(files[0].read_bytes()[:-3])
    store = opened(tmp_path)
    assert not remnant.exists()
    assert store.stats.rejected_files == 0


class Tiered(RuleBasedStateMachine):
    """All tiers and a limited window together: nothing wrong is ever read, whatever is evicted, lost or damaged."""

    @initialize(
        primary=st.integers(2, 6),
        host=st.sampled_from([0, 2, 3]),
        files=st.integers(1, 12),
        windows=st.sampled_from([(), (4,), (64, 3), (64, 5), (64, 64)]),
        copy=st.booleans(),
    )
    def start(self, primary: int, host: int, files: int, windows: tuple[int, ...], copy: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.geometry = Geometry(layers=2, kv_heads=1, head_dim=2, context=64)
        size = STEP * self.geometry.tensors * self.geometry.row_bytes
        self.now = 0
        self.config = StoreConfig(
            tokens_per_block=STEP,
            max_bytes=(64 if 64 in windows else 1) * primary * size,
            host_cache_size=(64 if 64 in windows else 1) * host * size,
            disk_folder=self.folder,
            disk_cache_size=files * 520,
            max_attention_window=windows,
            copy_on_partial_reuse=copy,
        )
        self.known: set[tuple[str | None, Tokens]] = set()
        self.open()

    @rule()
    def open(self) -> None:
        """Another process takes over; whatever was held or in memory only is lost."""
        self.store = PrefixStore(self.geometry, self.config, fingerprint="weights", clock_ms=lambda: self.now)
        self.held: list[Match] = []

    @rule()
    def save(self) -> None:
        self.store.save()

    @rule(salt=SALTS, tokens=TOKENS, keep=st.booleans())
    def match(self, salt: str | None, tokens: Tokens, keep: bool) -> None:
        match = self.store.match(tokens, salt)
        end = match.tokens
        assert not end or any(s == salt and t[:end] == tokens[:end] for s, t in self.known)
        self.check(match, tokens[:end], salt)
        if keep:
            self.held.append(match)
        else:
            self.store.release(match)

    @rule(salt=SALTS, tokens=TOKENS, priority=st.sampled_from([0, 35, 80]), ms=st.sampled_from([None, 3]))
    def insert(self, salt: str | None, tokens: Tokens, priority: int, ms: int | None) -> None:
        self.now += 1
        self.known.add((salt, tokens))
        policy = RetentionPolicy((TokenRangeRetentionConfig(0, None, priority, ms),))
        match = self.store.match((), salt)
        stored = self.store.insert(tokens, self.rows(tokens, salt), retention=policy, salt=salt, match=match)
        assert stored % STEP == 0
        self.check(match, tokens[: match.tokens], salt)
        self.store.release(match)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.store.release(self.held.pop(0))

    @rule(place=st.integers(0, 20), byte=st.integers(0, 400))
    def damage(self, place: int, byte: int) -> None:
        """A bit of some file turns, which keeps its size and with it the account of the disk."""
        files = sorted(self.folder.glob("*.safetensors"))
        if place < len(files) and byte < files[place].stat().st_size:
            flip(files[place], byte)

    @invariant()
    def lawful(self) -> None:
        if hasattr(self, "store"):
            audit_but_foreign(self.store, self.held)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            shutil.rmtree(self.folder)

    def rows(self, tokens: Tokens, salt: str | None) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return rows_of(tokens, salt, self.geometry)

    def check(self, match: Match, tokens: Tokens, salt: str | None) -> None:
        rows, truth = self.store.fetch(match), self.rows(tokens, salt)
        for group in self.store.groups:
            needed = group.first_needed(len(tokens))
            for first, stop in group.ranges:
                np.testing.assert_array_equal(rows[first:stop, needed:], truth[first:stop, needed:])


def audit_but_foreign(store: PrefixStore, held: list[Match]) -> None:
    """A flipped bit may have made a file foreign at opening; such a file is nobody's and not in the account."""
    folder = store.config.disk_folder
    assert folder is not None
    named = {
        store._storage._record(block).name(store._keys)
        for root in store._tree.roots.values()
        for node in root.subtree()
        for block in node.blocks
        if block is not None
    }
    for path in folder.glob("*.safetensors"):
        if path.name not in named:
            path.unlink()
    audit(store, held)


TestTiered = pytest.mark.slow(Tiered.TestCase)
TestTiered.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
