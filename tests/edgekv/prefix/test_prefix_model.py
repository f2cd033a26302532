"""The store against a dict of token tuples, and against restarts, damage, other processes and kills."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from edgekv.kv import Geometry, LayeredGeometry, RowSpec
from edgekv.prefix import (
    GroupRows,
    Match,
    PrefixStore,
    RetentionPolicy,
    Snapshot,
    StoreConfig,
    TokenRangeRetentionConfig,
)
from edgekv.prefix.keys import TOKEN_BYTES as ID_BYTES
from tests.support.prefix_cases import (
    GEOMETRY,
    STEP,
    TOKEN_BYTES,
    Tokens,
    audit,
    drawn,
    fetch,
    files,
    opened,
    rows_of,
    source,
    split,
)
from tests.support.thorough import calls

Name = tuple[str | None, Tokens]


@dataclass(eq=False)
class Entry:
    """One block as the oracle sees it."""

    priority: int = 35
    expires: int | None = None
    used: int = 0


@dataclass
class Oracle:
    """The store in memory, as slow and as plain as can be: one dict, scanned from end to end."""

    budget: int
    partial: bool
    entries: dict[Name, Entry] = field(default_factory=dict)
    now: int = 0
    used: int = 0

    def match(self, salt: str | None, tokens: Tokens) -> int:
        self.expire()
        path: list[Name] = []
        for stop in range(STEP, len(tokens) + 1, STEP):
            if (salt, tokens[:stop]) not in self.entries:
                break
            path.append((salt, tokens[:stop]))
        end = len(path) * STEP
        rest = tokens[end : end + STEP]
        if self.partial and rest:
            shared = {name: common(name[1][end:], rest) for name in self.children((salt, tokens[:end]))}
            best = max(shared.values(), default=0)
            if best:
                close = sorted(name for name, count in shared.items() if count == best)
                path.append(next((name for name in close if name[1][end:] >= rest), close[-1]))
                end += best
        self.touch(path)
        return end

    def insert(self, salt: str | None, tokens: Tokens, first: int, policy: RetentionPolicy | None, ended: bool) -> int:
        self.expire()
        path: list[Name] = []
        stops = list(range(STEP, len(tokens) + 1, STEP))
        if ended and self.partial and len(tokens) % STEP:
            stops.append(len(tokens))
        for stop in stops:
            start = (stop - 1) // STEP * STEP
            siblings = self.children((salt, tokens[:start]))
            name = (salt, tokens[:stop])
            if stop % STEP and any(n[1][:stop] == tokens for n in siblings):
                self.touch(path)
                return len(tokens)
            if name not in self.entries:
                if start < first or not self.room(stop - start, [*path, name]):
                    break
                self.entries = {
                    n: e for n, e in self.entries.items() if n not in siblings or n[1] != name[1][: len(n[1])]
                }
                self.entries[name] = Entry()
            wanted = policy.of(start, len(tokens)) if policy else None
            if wanted:
                expires = None if wanted.duration_ms is None else self.now + wanted.duration_ms
                self.entries[name].priority, self.entries[name].expires = wanted.priority, expires
            path.append(name)
        self.touch(path)
        return min(len(path[-1][1]), len(tokens)) if path else 0

    def room(self, tokens: int, needed: list[Name]) -> bool:
        if tokens > self.budget:
            return False
        while sum((len(n[1]) - 1) % STEP + 1 for n in self.entries) + tokens > self.budget:
            free = [n for n in self.entries if n not in needed and not self.children(n)]
            if not free:
                return False
            del self.entries[min(free, key=lambda n: (self.entries[n].priority, self.entries[n].used))]
        return True

    def touch(self, path: list[Name]) -> None:
        for name in reversed(path):
            self.used += 1
            self.entries[name].used = self.used

    def expire(self) -> None:
        for entry in self.entries.values():
            if entry.expires is not None and entry.expires <= self.now:
                entry.priority, entry.expires = 35, None

    def children(self, parent: Name) -> list[Name]:
        salt, tokens = parent
        size = len(tokens)
        if size % STEP:
            return []
        return [n for n in self.entries if n[0] == salt and size < len(n[1]) <= size + STEP and n[1][:size] == tokens]


def common(one: Tokens, other: Tokens) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


SALTS = st.sampled_from([None, None, "a", "b"])
TOKENS = st.lists(st.integers(0, 2), max_size=11).map(tuple)
POLICIES = st.none() | st.builds(
    lambda cut, one, other, ms: RetentionPolicy(
        (TokenRangeRetentionConfig(0, cut, one, ms), TokenRangeRetentionConfig(cut + 2, None, other))
    ),
    st.integers(1, 6),
    st.integers(0, 100),
    st.sampled_from([0, 20, 35, 80]),
    st.sampled_from([None, 5, 50]),
)


class AgainstOracle(RuleBasedStateMachine):
    """Each rule does the same to the store and to the oracle; the invariant compares all that they hold."""

    operations = 0

    @initialize(blocks=st.integers(1, 9), partial=st.booleans())
    def start(self, blocks: int, partial: bool) -> None:
        self.oracle = Oracle(blocks * STEP, partial)
        budget = blocks * STEP * TOKEN_BYTES
        config = StoreConfig(tokens_per_block=STEP, max_bytes=budget, enable_partial_reuse=partial)
        self.store = PrefixStore(GEOMETRY, config, clock_ms=lambda: self.oracle.now)

    @rule(salt=SALTS, tokens=TOKENS)
    def match(self, salt: str | None, tokens: Tokens) -> None:
        match = self.store.match(tokens, salt)
        assert match.tokens == self.oracle.match(salt, tokens)
        np.testing.assert_array_equal(fetch(self.store, match)[0], rows_of(tokens[: match.tokens], salt))

    @rule(salt=SALTS, tokens=TOKENS, first=st.sampled_from([0, 0, 1, 2, 4]), policy=POLICIES, ended=st.booleans())
    def insert(self, salt: str | None, tokens: Tokens, first: int, policy: RetentionPolicy | None, ended: bool) -> None:
        first = min(first, len(tokens))
        rows = source(tokens, salt, first)
        stored = self.store.insert(tokens, rows, retention=policy, salt=salt, ended=ended)
        assert stored == self.oracle.insert(salt, tokens, first, policy, ended)

    @rule(ms=st.sampled_from([1, 4, 45]))
    def wait(self, ms: int) -> None:
        self.oracle.now += ms

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "store"):
            return
        AgainstOracle.operations += 1
        held = sorted(self.store._memory, key=lambda block: block.used)
        keys = {self.store.root(salt): (salt, ()) for salt in (None, "a", "b")}
        for block in sorted(held, key=lambda block: block.link.start):
            salt, tokens = keys[block.link.parent]
            own = block.link.tokens
            more = (int.from_bytes(own[at : at + ID_BYTES]) for at in range(0, len(own), ID_BYTES))
            keys[block.link.key] = salt, (*tokens, *more)
        entries = sorted(self.oracle.entries.items(), key=lambda each: each[1].used)
        assert [(keys[block.link.key], block.priority) for block in held] == [(n, e.priority) for n, e in entries]
        assert sum(block.size_bytes for block in held) == self.store.stats.memory.bytes_held
        assert self.store.stats.memory.bytes_held <= self.oracle.budget * TOKEN_BYTES

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.same()


@pytest.mark.slow
def test_a_store_agrees_with_one_that_copies_everything() -> None:
    AgainstOracle.operations = 0
    examples = calls(60)
    run_state_machine_as_test(AgainstOracle, settings=settings(max_examples=examples, stateful_step_count=60))
    assert AgainstOracle.operations >= 40 * examples


# ---------------------------------------------------------------------- restarts, damage, two processes, two groups

TWO_WINDOWS = LayeredGeometry(2, 64, (1,), (2,), (64, 5))
ALL_TENSORS = RowSpec(layers=2, kv_heads=1, head_dim=2, window=64)


class Restarted(RuleBasedStateMachine):
    """Two stores on one folder, memory and disk both small: nothing wrong is ever read, whatever is lost or damaged."""

    @initialize(
        blocks=st.integers(2, 8),
        disk_files=st.integers(1, 14),
        geometry=st.sampled_from([ALL_TENSORS, TWO_WINDOWS]),
        snapshots=st.booleans(),
    )
    def start(self, blocks: int, disk_files: int, geometry: Geometry, snapshots: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.geometry, self.snapshots = geometry, snapshots
        self.config = StoreConfig(
            tokens_per_block=STEP,
            max_bytes=blocks * STEP * ALL_TENSORS.tensors * ALL_TENSORS.row_bytes,
            disk_folder=self.folder,
            disk_cache_size=disk_files * 180,
        )
        self.known: set[Name] = set()
        self.now = 0
        self.is_damaged = False
        self.stores = [self.open_one(), self.open_one()]

    def open_one(self) -> PrefixStore:
        return PrefixStore(
            self.geometry, self.config, fingerprint="w", snapshots=self.snapshots, clock_ms=lambda: self.now
        )

    @rule(which=st.integers(0, 1), closed=st.booleans())
    def restart(self, which: int, closed: bool) -> None:
        """Another process takes over; what was in memory alone is lost."""
        if closed:
            self.stores[which].close()
        self.stores[which] = self.open_one()

    @rule(which=st.integers(0, 1))
    def save(self, which: int) -> None:
        self.stores[which].save()

    @rule(which=st.integers(0, 1), salt=SALTS, tokens=TOKENS)
    def match(self, which: int, salt: str | None, tokens: Tokens) -> None:
        store = self.stores[which]
        match = store.match(tokens, salt)
        end = match.tokens
        assert not end or any(s == salt and t[:end] == tokens[:end] for s, t in self.known)
        truths = split(store, rows_of(tokens[:end], salt, ALL_TENSORS))
        for group, rows, truth in zip(store.groups, fetch(store, match), truths, strict=True):
            needed = group.first_needed(end)
            np.testing.assert_array_equal(rows[:, needed:], truth[:, needed:])
        self.check_states(match, tokens[:end], salt)

    def check_states(self, match: Match, tokens: Tokens, salt: str | None) -> None:
        assert (match.states is not None) == (self.snapshots and bool(tokens))
        if match.states is not None:
            np.testing.assert_array_equal(match.states.arrays["state"], states_of(tokens, salt))

    @rule(
        which=st.integers(0, 1),
        salt=SALTS,
        tokens=TOKENS,
        priority=st.sampled_from([0, 35, 80]),
        ms=st.sampled_from([None, 3]),
        ended=st.booleans(),
        data=st.data(),
    )
    def insert(
        self,
        which: int,
        salt: str | None,
        tokens: Tokens,
        priority: int,
        ms: int | None,
        ended: bool,
        data: st.DataObject,
    ) -> None:
        self.now += 1
        self.known.add((salt, tokens))
        at = data.draw(st.integers(1, len(tokens))) if self.snapshots and tokens else 0
        snapshot = Snapshot(at, {"state": states_of(tokens[:at], salt)}) if at else None
        policy = RetentionPolicy((TokenRangeRetentionConfig(0, None, priority, ms),))
        rows = GroupRows(split(self.stores[which], rows_of(tokens, salt, ALL_TENSORS)))
        self.stores[which].insert(tokens, rows, retention=policy, salt=salt, ended=ended, snapshot=snapshot)

    @rule(place=st.integers(0, 20), byte=st.integers(0, 400))
    def damage(self, place: int, byte: int) -> None:
        """A bit of some file turns."""
        names = sorted(self.folder.glob("*.safetensors"))
        if place < len(names) and byte < names[place].stat().st_size:
            self.is_damaged = True
            raw = bytearray(names[place].read_bytes())
            raw[byte] ^= 1
            names[place].write_bytes(raw)

    @rule(place=st.integers(0, 20))
    def lose(self, place: int) -> None:
        """Somebody removes a file; a later store finds that out."""
        names = sorted(self.folder.glob("*.safetensors"))
        if place < len(names):
            self.is_damaged = True
            names[place].unlink()
            self.stores = [self.open_one(), self.open_one()]

    @invariant()
    def lawful(self) -> None:
        if hasattr(self, "stores"):
            audit(self.folder, self.config.disk_cache_size, whole=not self.is_damaged)
            for store in self.stores:
                assert store.stats.memory.bytes_held <= self.config.max_bytes  # type: ignore[operator]

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            shutil.rmtree(self.folder)


def states_of(tokens: Tokens, salt: str | None) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return rows_of(tokens, salt)[:, -1].copy()


@pytest.mark.slow
def test_nothing_wrong_is_read_after_restarts_and_damage() -> None:
    run_state_machine_as_test(Restarted, settings=settings(max_examples=calls(25), stateful_step_count=40))


# ---------------------------------------------------------------------- kills


def kill_often(folder: Path, kills: int, operations: int, disk_bytes: int, *, whole: bool) -> tuple[int, int, int]:
    """Operations done, sequences lost and rows that are wrong, over so many killed processes.

    Args:
        folder: of all processes.
        kills: processes.
        operations: matches, insertions and saves of all of them, at least.
        disk_bytes: limit of the folder.
        whole: whether the limit is so large that nothing may be lost.
    """
    draw, done, lost, wrong = random.Random(0), 0, 0, 0
    saved: list[Tokens] = []
    for kill in range(kills):
        call = f"from tests.support.prefix_cases import *; work(Path({str(folder)!r}), {kill}, {disk_bytes})"
        command = [sys.executable, "-c", call]
        least = max(1, (operations - done) // (3 * (kills - kill))) if operations else draw.randrange(1, 12)
        fresh = []
        with subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for count, tokens in zip(range(least), drawn(kill), strict=False):
                assert child.stdout.readline().strip() == str(count)
                fresh.append(tokens)
                done += 3
            time.sleep(draw.uniform(0, 0.02))  # in the middle of what follows, wherever that is
            os.kill(child.pid, signal.SIGKILL)
        store = opened(folder, disk_cache_size=disk_bytes)
        assert not list(folder.glob(".*partial*"))
        audit(folder, disk_bytes)
        saved += fresh
        for tokens in saved if kill == kills - 1 else [*fresh, *draw.sample(saved, min(20, len(saved)))]:
            match = store.match(tokens)
            wrong += not np.array_equal(fetch(store, match)[0], rows_of(tokens[: match.tokens]))
            lost += whole and match.tokens < len(tokens)
            done += 1
        assert store.stats.rejected_files == 0
        store.close()
    return done, lost, wrong


@pytest.mark.slow
def test_kills_lose_nothing_that_was_saved(tmp_path: Path) -> None:
    _, lost, wrong = kill_often(tmp_path, 5, 0, 1 << 30, whole=True)
    assert (lost, wrong) == (0, 0)


@pytest.mark.slow
def test_kills_leave_no_wrong_block_where_files_are_evicted(tmp_path: Path) -> None:
    _, _, wrong = kill_often(tmp_path, 5, 0, 40 * 170, whole=False)
    assert wrong == 0 and files(tmp_path)


def main() -> None:
    """A long run of the two tests above; `--kills 57 --operations 30000` is what the notebook states."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=57)
    parser.add_argument("--operations", type=int, default=30_000)
    given = parser.parse_args()
    for disk_bytes, whole in ((1 << 30, True), (200 * 170, False)):
        with tempfile.TemporaryDirectory() as folder:
            kills = given.kills
            done, lost, wrong = kill_often(Path(folder), kills, given.operations // 2, disk_bytes, whole=whole)
        print(f"{done:,} operations, {kills} kills, limit {disk_bytes:,} bytes: {lost} lost, {wrong} wrong")


if __name__ == "__main__":
    main()
