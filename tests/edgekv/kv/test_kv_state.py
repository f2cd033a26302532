"""A saved cache: any strategy goes on from any other's, and what does not belong is refused by name."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgekv.errors import EdgeKVError
from edgekv.kv import KVCache, LayeredGeometry, StateError, read_state, state, write_state
from edgekv.machine.tensor_file import decode_tensors, encode_tensors
from quant import Encoding
from tests.support.kv_graph import feed, geometry_of, held, image
from tests.support.thorough import at_most

MADE = [
    ("pointer-shift", "rows"),
    ("slot", "rows"),
    ("mirror", "rows"),
    ("shift-concat", "rows"),
    ("pointer-shift", "columns"),
    ("slot", "columns"),
    ("mirror", "columns"),
    ("shift-concat", "columns"),
]


def make(made=MADE[0], *, policy="fail", context=12, kv_dtype="u8", **options):
    strategy, key_layout = made
    geometry = geometry_of(context, kv_dtype, key_layout=key_layout)
    return KVCache(geometry, ar=[1, 4], strategy=strategy, policy=policy, **options)


@pytest.mark.slow
@at_most(100)
@given(
    made=st.tuples(st.sampled_from(MADE), st.sampled_from(MADE)),
    tokens=st.integers(0, 30),
    ar=st.sampled_from([1, 4]),
    kv_dtype=st.sampled_from(["u8", "s16"]),
)
def test_any_strategy_goes_on_from_another_s_state(made, tokens, ar, kv_dtype):
    first, second = (make(each, policy="sliding-window", kv_dtype=kv_dtype) for each in made)
    for token in range(tokens):
        feed(first, ar, [token])
    for token in range(7):
        feed(second, 1, [500 + token])
    second.restore(first.state)
    assert held(second) == held(first) == list(range(max(0, tokens - 11), tokens))
    assert second.tokens_seen == second.position == tokens
    for token in range(tokens, tokens + 15):
        assert sorted(feed(first, 1 + 3 * (token % 2), [token])) == sorted(feed(second, 1 + 3 * (token % 2), [token]))
    assert first.state.positions == second.state.positions
    assert all(np.array_equal(rows, second.state.rows[name]) for name, rows in first.state.rows.items())


@pytest.mark.parametrize("made", MADE)
def test_a_file_holds_a_full_context(tmp_path, made):
    cache = make(made)
    for token in range(12):
        feed(cache, 1, [token])
    write_state(cache.state, tmp_path / "state", fingerprint="a model")
    other = make()
    other.restore(read_state(tmp_path / "state", fingerprint="a model"))
    assert held(other) == list(range(12))
    assert not other.room(1)
    other.rewind(3)
    assert feed(other, 1, [9]) == list(range(9))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def refused(cache, file, fingerprint="a model"):
    """The refusal; the cache is as it was."""
    before = image(cache)
    with pytest.raises(StateError) as caught:
        cache.restore(read_state(file, fingerprint=fingerprint))
    assert image(cache) == before
    return str(caught.value)


@pytest.fixture
def file(tmp_path):
    cache = make(encodings=[Encoding("u8", 0.5, 128)] * 4)
    for token in range(5):
        feed(cache, 1, [token])
    write_state(cache.state, tmp_path / "state", fingerprint="a model")
    return tmp_path / "state"


def test_what_does_not_belong_is_refused_by_name(file):
    same = {"encodings": [Encoding("u8", 0.5, 128)] * 4}
    assert "fingerprint: got a model; expected another" in refused(make(**same), file, "another")
    assert "geometry: got" in refused(make(context=13, **same), file)
    assert "geometry: got" in refused(make(kv_dtype="s16"), file)
    assert "geometry: got" in refused(KVCache(geometry_of(12, row_bytes=16), ar=[1, 4], **same), file)
    assert "encodings: got" in refused(make(), file)
    assert "encodings: got" in refused(make(encodings=[Encoding("u8", 0.25, 128)] * 4), file)
    assert "file: got No such file" in refused(make(), file.with_name("none"))
    make(**same).restore(read_state(file, fingerprint="a model"))


def test_a_truncated_file_is_refused(file):
    content = file.read_bytes()
    cache = make(encodings=[Encoding("u8", 0.5, 128)] * 4)
    for size in [0, 1, 7, 8, 9, *range(10, len(content), 37), len(content) - 1]:
        file.write_bytes(content[:size])
        assert "expected" in refused(cache, file)


def test_a_flipped_bit_is_refused(file):
    content = file.read_bytes()
    cache = make(encodings=[Encoding("u8", 0.5, 128)] * 4)
    before = image(cache)
    bits = random.Random(0).sample(range(8 * len(content)), 1500)
    for bit in bits:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(StateError):
            cache.restore(read_state(file, fingerprint="a model"))
    assert image(cache) == before


def test_more_tokens_than_a_policy_holds_are_refused(file):
    cache = make()
    for token in range(12):
        feed(cache, 1, [token])
    with pytest.raises(EdgeKVError, match="tokens: got 12; expected 11 at most"):
        make(policy="sliding-window").restore(cache.state)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StateError, match="No such file or directory; expected a writable file"):
        write_state(make().state, tmp_path / "none" / "state", fingerprint="a model")


def test_layers_that_differ_are_saved_together(tmp_path):
    geometry = LayeredGeometry(4, 12, kv_heads=(1, 2), head_dim=(8,), windows=(6, 12))
    first, second = (KVCache(geometry, ar=[1], strategy=name) for name in ("mirror", "slot"))
    for _ in range(9):
        first.window(1)
        first.commit(1)
    for group in first.groups:
        group.arenas[0].array[:] = np.random.default_rng(0).integers(0, 255, group.arenas[0].array.shape)
    write_state(first.state, tmp_path / "state", fingerprint="")
    second.restore(read_state(tmp_path / "state", fingerprint=""))
    assert [group.length for group in second.groups] == [5, 9]
    assert all(np.array_equal(rows, second.state.rows[name]) for name, rows in first.state.rows.items())


def test_a_file_is_closed_when_it_gets_its_name(tmp_path, monkeypatch):
    """Windows renames no file that is open."""
    replace, renamed = Path.replace, []

    def closed_replace(path, target):
        descriptors = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if os.path.lexists(each)]
        assert str(path) not in descriptors
        renamed.append(target)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", closed_replace)
    write_state(make(MADE[0]).state, tmp_path / "state", fingerprint="f")
    assert renamed == [tmp_path / "state"] == [*tmp_path.iterdir()]


def crafted(file: Path, **parts: object) -> None:
    """Change parts of a state, and give it the digest that belongs to them."""
    held = decode_tensors(file.read_bytes())
    metadata = {**held.metadata, **{name: json.dumps(value) for name, value in parts.items() if value is not None}}
    for name in [name for name, value in parts.items() if value is None]:
        del metadata[name]
    del metadata["sha256"]
    metadata["sha256"] = state._digest(metadata, held.arrays)
    file.write_bytes(encode_tensors(held.arrays, metadata))


@pytest.mark.parametrize(
    "parts",
    [
        {"positions": None},
        {"tokens": None},
        {"sizes": 5},
        {"sizes": {}},
        {"encodings": {"past_key_0_h0_in": [1]}},
        {"encodings": "x"},
        {"positions": [0, 1, "2"]},
        {"positions": [2, 1, 0]},
        {"positions": [0, 1, 10**30]},
        {"position": -1},
        {"position": 2.5},
        {"rewindable": 10**6},
        {"tokens_seen": None},
        {"tokens_seen": 1},
        {"tokens": [-1, 5, 6]},
        {"tokens": ["a", "b", "c"]},
        {"more": 1},
        {"fingerprint": 7},
    ],
)
def test_crafted_content_with_the_right_digest_is_refused(tmp_path, parts):
    cache = make()
    for token in range(3):
        feed(cache, 1, [token])
    write_state(cache.state, tmp_path / "state", fingerprint="a model")
    crafted(tmp_path / "state")
    make().restore(read_state(tmp_path / "state", fingerprint="a model"))
    crafted(tmp_path / "state", **parts)
    assert "state" in refused(make(), tmp_path / "state")


@pytest.mark.parametrize("made", MADE)
def test_a_sliding_window_counts_the_tokens_that_it_drops(made):
    cache = make(made, policy="sliding-window")
    for token in range(30):
        feed(cache, 1, [token])
    assert cache.stats.evicted == 30 - cache.length > 0


def test_a_policy_as_text_is_refused_with_the_names_of_the_objects():
    with pytest.raises(EdgeKVError, match=r"got 'sinks\(2,8\)'; .* or a Sinks or KeyDiff of edgekv\.kv"):
        make(policy="sinks(2,8)")


KILLED_WHILE_WRITING = """
import os, signal, sys
from edgekv.kv import CacheState, write_state
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
state = CacheState(
    sizes={}, encodings={}, positions=(), position=0, rewindable=0, tokens_seen=0, rows={}, tokens=()
)
write_state(state, sys.argv[1], fingerprint="f")
"""


def test_what_a_killed_process_left_of_a_state_is_removed_by_the_next(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(tmp_path / "s")], check=False)
    assert done.returncode == -signal.SIGKILL and len([*tmp_path.iterdir()]) == 1
    write_state(make().state, tmp_path / "s", fingerprint="f")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_larger_than_a_state_can_be_is_not_read(tmp_path):
    with (tmp_path / "s").open("wb") as file:
        file.truncate(40 << 30)  # a sparse file
    with pytest.raises(StateError, match=r"state .*: file: got file of 42\.95 GB, more than the limit of .* MB"):
        read_state(tmp_path / "s", fingerprint="", rows_bytes=1 << 20)
    with pytest.raises(StateError, match=r"state .*: file: got file of 42\.95 GB, more than the limit of .* GB"):
        read_state(tmp_path / "s", fingerprint="")
