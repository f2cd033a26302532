"""The store against a dict of token tuples: every operation, every length, every eviction."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgekv.kv import Geometry
from edgekv.prefix import Match, PrefixStore, RetentionPolicy, StoreConfig, TokenRangeRetentionConfig
from edgekv.prefix.block import ABSENT, Block, Node, Tier
from edgekv.prefix.rows import Rows

GEOMETRY = Geometry(layers=1, kv_heads=1, head_dim=2, context=64)
STEP = 2
BLOCK_BYTES = STEP * GEOMETRY.tensors * GEOMETRY.row_bytes

Tokens = tuple[int, ...]
Name = tuple[str | None, Tokens]


def rows_of(tokens: Tokens, salt: str | None = None, geometry: Geometry = GEOMETRY) -> Rows:
    """Rows that differ for every beginning and salt, as real keys and values do."""
    rows = np.empty((geometry.tensors, len(tokens), geometry.head_dim), np.uint8)
    digest = zlib.crc32(repr(salt).encode())
    places = np.arange(geometry.tensors * geometry.head_dim, dtype=np.uint64).reshape(geometry.tensors, -1)
    for place, token in enumerate(tokens):
        digest = zlib.crc32(token.to_bytes(4, "little"), digest)
        rows[:, place] = (places * 0x9E3779B1 + digest) >> np.uint64(5) & np.uint64(255)
    return rows


def nodes_of(store: PrefixStore) -> Iterator[Node]:
    for root in store._tree.roots.values():
        assert root.children
        yield from root.subtree()[1:]


def audit(store: PrefixStore, matches: list[Match]) -> None:
    """What must hold after any operation: reference counts, no leak, no budget exceeded, the laws of the tiers."""
    held = Counter(b for m in matches for span in m._lease.spans for b in span.blocks)
    ids: list[Counter[int]] = [Counter() for _ in store.groups]
    hosts = [0] * len(store.groups)
    files = 0
    for block, count in held.items():
        ids[block.group][block.places[Tier.PRIMARY]] += count
    for node in nodes_of(store):
        assert not node.is_empty
        assert node.order == sorted(node.children)
        for block in node.blocks:
            if block is not None:
                assert not block.is_nowhere
                assert not block.guards
                if block.is_in(Tier.PRIMARY):
                    ids[block.group][block.places[Tier.PRIMARY]] += 1
                hosts[block.group] += block.is_in(Tier.HOST)
                files += block.is_in(Tier.DISK)
                check_laws(store, block)
    for group in range(len(store.groups)):
        primary, host = (store._tiers.pools[tier][group] for tier in (Tier.PRIMARY, Tier.HOST))
        assert primary.used == len(ids[group]) <= store.limits.primary[group]
        assert all(primary.references(block) == count for block, count in ids[group].items())
        assert host.used == hosts[group] <= store.limits.host[group]
    assert store.stats.disk.blocks == files
    if store.config.disk_folder is not None:
        sizes = [path.stat().st_size for path in store.config.disk_folder.glob("*.safetensors")]
        assert sum(sizes) == store.stats.disk.bytes_held <= store.config.disk_cache_size


def check_laws(store: PrefixStore, block: Block) -> None:
    """With full attention a block is of use only if the one before it is at least as near."""
    assert not (block.is_in(Tier.PRIMARY) and block.is_in(Tier.HOST))
    if store.groups[block.group].window is not None:
        return
    following = [child.blocks[block.group] for child in block.node.children.values()]
    for tier in Tier:
        assert block.following[tier] == sum(b is not None and b.is_in(tier) for b in following)
    before = block.node.parent.blocks[block.group] if block.node.parent else None
    if before is None:
        assert block.node.parent is not None
        assert block.node.parent.parent is None
        return
    assert before.is_in(Tier.DISK) or not block.is_in(Tier.DISK)
    assert before.is_in(Tier.PRIMARY) or not block.is_in(Tier.PRIMARY)
    assert before.is_in(Tier.PRIMARY) or before.is_in(Tier.HOST) or not block.is_in(Tier.HOST)


@dataclass(eq=False)
class Entry:
    """One block as the oracle sees it."""

    tier: Tier = Tier.PRIMARY
    priority: int = 35
    expires: int | None = None
    stamp: int = 0
    held: int = 0


@dataclass
class Oracle:
    """The same behaviour, as slow and as plain as can be: one dict, scanned from end to end."""

    primary: int
    host: int
    partial: bool
    copy: bool
    entries: dict[Name, Entry] = field(default_factory=dict)
    private: list[Entry] = field(default_factory=list)
    needed: set[int] = field(default_factory=set)
    now: int = 0
    stamp: int = 0

    def expire(self) -> None:
        for entry in self.entries.values():
            if entry.expires is not None and entry.expires <= self.now:
                entry.priority, entry.expires = 35, None

    def match(self, salt: str | None, tokens: Tokens) -> tuple[int, list[Entry]]:
        self.expire()
        path: list[Name] = []
        for stop in range(STEP, len(tokens) + 1, STEP):
            if (salt, tokens[:stop]) not in self.entries:
                break
            path.append((salt, tokens[:stop]))
        upper = len(path) * STEP
        begin, rest = tokens[:upper], tokens[upper : upper + STEP]
        if self.partial and rest:
            found = {
                n[1][upper:]: common(n[1][upper:], rest)
                for n, e in self.entries.items()
                if n[0] == salt
                and upper < len(n[1]) <= upper + STEP
                and n[1][:upper] == begin
                and (self.copy or (not e.held and not self.children(n)))
            }
            best = max(found.values(), default=0)
            if best:
                close = [t for t, count in found.items() if count == best]
                above = [t for t in close if t >= rest]
                path.append((salt, begin + (min(above) if above else max(close))))
                upper += best
        end, entries = self.hold(path, upper)
        if end % STEP and not self.copy:
            self.private.append(self.entries.pop(path[-1]))
        return end, entries

    def hold(self, path: list[Name], upper: int) -> tuple[int, list[Entry]]:
        self.needed = {id(self.entries[name]) for name in path}
        while True:
            entries = [self.entries[name] for name in path[: -(-upper // STEP)]]
            failed = next((i for i, entry in enumerate(entries) if not self.bring(entry)), None)
            if failed is None:
                break
            upper = failed * STEP
        self.needed = set()
        for entry in entries:
            self.touch(entry)
            entry.held += 1
        return upper, entries

    def release(self, entries: list[Entry]) -> None:
        for entry in entries:
            entry.held -= 1
            if not entry.held and any(entry is other for other in self.private):
                self.private = [other for other in self.private if other is not entry]

    def insert(
        self, salt: str | None, tokens: Tokens, first: int, policy: RetentionPolicy | None, ended: bool = False
    ) -> list[Name]:
        self.expire()
        path: list[Name] = []
        stops = list(range(STEP, len(tokens) + 1, STEP))
        if ended and self.partial and len(tokens) % STEP:
            stops.append(len(tokens))
        for stop in stops:
            start = (stop - 1) // STEP * STEP
            name = (salt, tokens[:stop])
            if stop % STEP:
                name = min((n for n in self.beside(name) if n[1][:stop] == tokens), default=name)
            entry = self.entries.get(name)
            if entry is None:
                if start < first or not self.room(Tier.PRIMARY):
                    break
                entry = self.entries[name] = Entry()
                self.replace(name)
            else:
                self.needed.add(id(entry))
                if not self.bring(entry):
                    break
            path.append(name)
            self.needed.add(id(entry))
            self.touch(entry)
            wanted = policy.of(start, len(tokens)) if policy else None
            if wanted:
                entry.priority = wanted.priority
                entry.expires = None if wanted.duration_ms is None else self.now + wanted.duration_ms
        self.needed = set()
        return path

    def beside(self, name: Name) -> list[Name]:
        """The names of the blocks that follow the same one."""
        start = (len(name[1]) - 1) // STEP * STEP
        return [
            n
            for n in self.entries
            if n[0] == name[0] and n[1][:start] == name[1][:start] and 0 < len(n[1]) - start <= STEP
        ]

    def replace(self, name: Name) -> None:
        before = max((n for n in self.beside(name) if n[1] < name[1]), default=name)
        entry = self.entries[before]
        if (
            before != name
            and before[1] == name[1][: len(before[1])]
            and not entry.held
            and id(entry) not in self.needed
        ):
            del self.entries[before]

    def touch(self, entry: Entry) -> None:
        self.stamp += 1
        entry.stamp = self.stamp

    def bring(self, entry: Entry) -> bool:
        if entry.tier is Tier.HOST:
            first = self.first(Tier.PRIMARY) if self.is_full(Tier.PRIMARY) else None
            if first is not None and self.is_worth(first):
                self.entries[first].tier = Tier.HOST
            elif not self.room(Tier.PRIMARY):
                return False
            entry.tier = Tier.PRIMARY
        return True

    def is_full(self, tier: Tier) -> bool:
        there = sum(e.tier is tier for e in self.entries.values())
        return there + (len(self.private) if tier is Tier.PRIMARY else 0) >= (self.primary, self.host)[tier]

    def first(self, tier: Tier) -> Name | None:
        """Who would have to go."""
        names = [n for n, e in self.entries.items() if e.tier is tier and self.may_go(n, e)]
        return min(names, key=lambda n: (self.entries[n].priority, self.entries[n].stamp), default=None)

    def is_worth(self, name: Name) -> bool:
        return self.entries[name].priority >= 35 or bool(self.children(name))

    def room(self, tier: Tier) -> bool:
        """Whether one more fits; evicts if need be."""
        if not self.is_full(tier):
            return True
        first = self.first(tier)
        if first is None:
            return False
        self.evict(first, tier)
        return True

    def may_go(self, name: Name, entry: Entry) -> bool:
        following = [self.entries[child].tier for child in self.children(name)]
        return id(entry) not in self.needed and not entry.held and all(tier > entry.tier for tier in following)

    def evict(self, name: Name, tier: Tier) -> None:
        entry = self.entries[name]
        if tier is Tier.PRIMARY and self.host and self.is_worth(name):
            self.needed.add(id(entry))
            free = self.room(Tier.HOST)
            self.needed.discard(id(entry))
            if free:
                entry.tier = Tier.HOST
                return
        if len(name[1]) % STEP:
            del self.entries[name]
            return
        self.entries = {n: e for n, e in self.entries.items() if n[0] != name[0] or n[1][: len(name[1])] != name[1]}

    def children(self, name: Name) -> list[Name]:
        salt, tokens = name
        size = len(tokens)
        if size % STEP:
            return []
        return [n for n in self.entries if n[0] == salt and size < len(n[1]) <= size + STEP and n[1][:size] == tokens]


def common(one: Tokens, other: Tokens) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


SALTS = st.sampled_from([None, None, "a", "b"])
TOKENS = st.lists(st.integers(0, 2), max_size=11).map(tuple)
DURATIONS = st.sampled_from([None, 5, 50])
POLICIES = st.none() | st.builds(
    lambda cut, one, other, ms: RetentionPolicy(
        (TokenRangeRetentionConfig(0, cut, one, ms), TokenRangeRetentionConfig(cut + 2, None, other))
    ),
    st.integers(1, 6),
    st.integers(0, 100),
    st.sampled_from([0, 20, 35, 80]),
    DURATIONS,
)


class AgainstOracle(RuleBasedStateMachine):
    """Each rule does the same to the store and to the oracle; the invariant compares all that they hold."""

    operations = 0

    @initialize(primary=st.integers(1, 7), host=st.integers(0, 4), partial=st.booleans(), copy=st.booleans())
    def start(self, primary: int, host: int, partial: bool, copy: bool) -> None:
        self.oracle = Oracle(primary, host, partial, copy)
        config = StoreConfig(
            tokens_per_block=STEP,
            max_bytes=primary * BLOCK_BYTES,
            host_cache_size=host * BLOCK_BYTES,
            enable_partial_reuse=partial,
            copy_on_partial_reuse=copy,
        )
        self.store = PrefixStore(GEOMETRY, config, clock_ms=lambda: self.oracle.now)
        self.held: list[tuple[Match, list[Entry], str | None, Tokens]] = []

    @rule(salt=SALTS, tokens=TOKENS, keep=st.booleans())
    def match(self, salt: str | None, tokens: Tokens, keep: bool) -> None:
        match = self.store.match(tokens, salt)
        end, entries = self.oracle.match(salt, tokens)
        assert match.tokens == end
        self.held.append((match, entries, salt, tokens[:end]))
        np.testing.assert_array_equal(self.store.fetch(match), rows_of(tokens[:end], salt))
        if not keep:
            self.give_back(len(self.held) - 1)

    @rule(salt=SALTS, tokens=TOKENS, first=st.sampled_from([0, 0, 1, 2, 4]), policy=POLICIES, ended=st.booleans())
    def insert(self, salt: str | None, tokens: Tokens, first: int, policy: RetentionPolicy | None, ended: bool) -> None:
        first = min(first, len(tokens))
        rows = rows_of(tokens, salt)[:, first:]
        stored = self.store.insert(tokens, rows, first=first, retention=policy, salt=salt, ended=ended)
        path = self.oracle.insert(salt, tokens, first, policy, ended)
        assert stored == min(len(path) * STEP, len(tokens))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=TOKENS)
    def go_on(self, data: st.DataObject, more: Tokens) -> None:
        """A request stores what it has computed behind its match and holds it."""
        place = data.draw(st.integers(0, len(self.held) - 1))
        match, entries, salt, tokens = self.held[place]
        tokens += more
        stored = self.store.insert(tokens, rows_of(tokens, salt), salt=salt, match=match)
        path = self.oracle.insert(salt, tokens, 0, None)
        end, fresh = self.oracle.hold(path, len(path) * STEP)
        self.oracle.release(entries)
        assert stored == end == match.tokens
        self.held[place] = (match, fresh, salt, tokens[:end])
        np.testing.assert_array_equal(self.store.fetch(match), rows_of(tokens[:end], salt))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.give_back(data.draw(st.integers(0, len(self.held) - 1)))

    @rule(ms=st.sampled_from([1, 4, 45]))
    def wait(self, ms: int) -> None:
        self.oracle.now += ms

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "store"):
            return
        AgainstOracle.operations += 1
        salts = {self.store._root_key(salt): salt for salt in (None, "a", "b")}
        found = {}
        for node in nodes_of(self.store):
            root, *path = node.path()
            (block,) = node.blocks
            assert block is not None
            tier = Tier.PRIMARY if block.places[Tier.PRIMARY] != ABSENT else Tier.HOST
            name = (salts[root.key], tuple(token for step in path for token in step.tokens))
            found[name] = (tier, block.priority, block.stamp)
        assert found == {name: (e.tier, e.priority, e.stamp) for name, e in self.oracle.entries.items()}
        audit(self.store, [match for match, *_ in self.held])

    def teardown(self) -> None:
        if hasattr(self, "store"):
            while self.held:
                self.give_back(0)
            self.same()

    def give_back(self, place: int) -> None:
        match, entries, *_ = self.held.pop(place)
        self.store.release(match)
        self.oracle.release(entries)


TestAgainstOracle = pytest.mark.slow(AgainstOracle.TestCase)
TestAgainstOracle.settings = settings(max_examples=220, stateful_step_count=60, deadline=None)


@pytest.mark.slow
def test_the_model_saw_ten_thousand_operations() -> None:
    assert AgainstOracle.operations >= 10_000
