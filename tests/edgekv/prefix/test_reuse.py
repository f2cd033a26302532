"""Prefixes on a real model: what is reused changes no token."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgekv
from edgekv.cli import run
from edgekv.errors import BundleError, UsageError
from edgekv.kv import KVCache, LayeredGeometry, RowSpec
from edgekv.loading import bake_prefix
from edgekv.paged import paged_attention
from edgekv.prefix import GroupRows, PrefixStore, RetentionPolicy, StoreConfig, TokenRangeRetentionConfig
from edgekv.prefix.rows import CacheRows
from edgekv.spec.geometry import KeyLayout, KvDtype
from edgekv.text import Token
from tests.support.bundles import ROW_STEPS, assert_same_or_tied, change_manifest
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import export_options, exported
from tests.support.thorough import variants

STEP = 16
EDGES = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49)
CONFIG = StoreConfig(tokens_per_block=STEP, max_bytes=1 << 24)
STRATEGIES = ("slot", "pointer-shift", "mirror", "shift-concat")


def _ids(tokens: Iterable[Token]) -> list[int]:
    return [token.id for token in tokens]


def _load(bundle: Path, engine: str = "cpu", **options: Any) -> edgekv.Model:
    return edgekv.load(bundle, engine, verify=False, threads=1 if engine == "cpu" else None, **options)


def _rows(cache: KVCache) -> list[np.ndarray[Any, Any]]:
    """Keys and values of the tokens held, tensor by tensor."""
    return [rows for _, rows in sorted(cache.state.rows.items())]


@pytest.fixture(scope="module")
def text(bundle: Path, embedded: Path) -> list[int]:
    return _load(bundle).encode((embedded / "heldout.txt").read_text("utf-8")[:2000])[:60]


@pytest.fixture(scope="module")
def wanted(bundle: Path, text: list[int]) -> list[int]:
    """What is generated without a store."""
    return _ids(_load(bundle).generate(text, 8))


def _after(model: edgekv.Model, text: Sequence[int], length: int) -> edgekv.Model:
    """Let a model's store know the first tokens of a text."""
    list(model.generate(text[:length], 1))
    return model


@pytest.fixture(scope="module")
def model(bundle: Path) -> edgekv.Model:
    return _load(bundle, prefix_cache=CONFIG)


@pytest.mark.parametrize("length", EDGES)
def test_every_match_length_gives_the_same_tokens(
    model: edgekv.Model, text: list[int], wanted: list[int], length: int
) -> None:
    list(model.generate(text[:length], 1, cache_salt=f"{length}"))
    generation = model.generate(text, 8, cache_salt=f"{length}")
    assert _ids(generation) == wanted
    assert generation.stats.cache.restored_tokens == length
    assert generation.stats.cache.computed_tokens == len(text) - length + 7


@pytest.mark.htp
def test_every_match_length_gives_the_same_bits_on_the_htp(small_on_htp: Path) -> None:
    model = _load(small_on_htp, "htp", prefix_cache=CONFIG)
    store, text = model.prefix_store, list(range(60))
    assert store is not None
    found, rows = {}, np.empty(0, np.uint8)
    for length in (0, *EDGES):
        if length:
            store.insert(text[:length], GroupRows([rows[:, :length]]), salt=f"{length}", ended=True)
        generation = model.generate(text, 1, cache_salt=f"{length}")
        list(generation)
        assert generation.stats.cache.restored_tokens == length
        rows = model.cache.arena.array[:, model.cache.held_rows()]
        found[length] = [rows, model.session.feed((7,)).copy()]
    for each in found.values():
        assert all(np.array_equal(one, other) for one, other in zip(found[0], each, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_takes_and_gives_the_same_rows(
    bundle: Path, model: edgekv.Model, text: list[int], wanted: list[int], strategy: str
) -> None:
    """One store for all of them: what one strategy has computed another one restores."""
    store = model.prefix_store
    assert store is not None
    other = _load(bundle, kv_update=strategy, prefix_cache=store)
    list(model.generate(text[:33], 1, cache_salt="33"))
    generation = other.generate(text, 8, cache_salt="33")
    assert _ids(generation) == wanted
    assert generation.stats.cache.restored_tokens >= 33
    fresh = other.generate(text, 8, cache_salt=strategy)
    assert (_ids(fresh), fresh.stats.cache.restored_tokens) == (wanted, 0)
    back = model.generate(text, 8, cache_salt=strategy)
    assert (_ids(back), back.stats.cache.restored_tokens) == (wanted, len(text) - 1)


@pytest.mark.parametrize("dtype", ["u8", "s16"])
@pytest.mark.parametrize(
    ("strategy", "layout"),
    [*((strategy, "rows") for strategy in STRATEGIES), *((strategy, "columns") for strategy in STRATEGIES)],
)
def test_a_cache_gives_back_what_it_was_given(strategy: str, dtype: KvDtype, layout: KeyLayout) -> None:
    """Layers of a limited window too: their blocks are stored before the cache lets go of them."""
    geometry = LayeredGeometry(3, 24, (2, 1, 2), (8,), (24, 12, 24), dtype, layout)
    store = PrefixStore(geometry, StoreConfig(tokens_per_block=4, max_bytes=1 << 20))
    cache, seen = KVCache(geometry, ar=(1, 5), strategy=strategy), 0
    for ar in (5, 5, 1, 5):
        cache.window(ar)
        cache.commit(ar)
        _write_newest(cache, ar)
        seen += ar
        stored = store.insert(range(seen), CacheRows(cache, store.groups), ended=seen == 16)
    assert stored == 16
    other = KVCache(geometry, ar=(1, 5), strategy="slot")
    match = store.match(range(20))
    with other.hold(match.tokens):
        store.restore(match, CacheRows(other, store.groups))
    assert match.tokens == 16
    for name, rows in cache.state.rows.items():
        np.testing.assert_array_equal(other.state.rows[name], rows)


def _write_newest(cache: KVCache, tokens: int) -> None:
    """What a graph would have written, as noise."""
    random = np.random.default_rng(cache.tokens_seen)
    for group in cache.groups:
        rows = group.strategy.held_rows()[-tokens:]
        for store in group.arenas:
            for tensor in range(len(store.tensors)):
                store.write(tensor, rows, random.integers(0, 99, (len(rows), 8)).astype(store.dtype))


@pytest.mark.slow
def test_layers_of_a_limited_window_are_restored_too(tmp_path: Path) -> None:
    options = export_options(context=(32, 64), ar=(1, 8), max_attention_window=(12, 64), kv_dtype="s16")
    bundle = exported(write_checkpoint(tmp_path / "checkpoint"), options)
    text = [(37 * i * i + 5 * i) % 250 for i in range(45)]
    model = _load(bundle, prefix_cache=StoreConfig(tokens_per_block=4, max_bytes=1 << 24))
    cold = model.generate(text, 4, cache_salt="cold")
    wanted, rows = _ids(cold), _rows(model.cache)
    for length in (3, 4, 5, 12, 16, 17, 40, 44):
        list(model.generate(text[:length], 1, cache_salt=f"{length}"))
        warm = model.generate(text, 4, cache_salt=f"{length}")
        assert _ids(warm) == wanted
        assert length // 4 * 4 <= warm.stats.cache.restored_tokens <= length
        assert all(np.abs(one.astype(int) - two).max() <= 64 for one, two in zip(rows, _rows(model.cache), strict=True))


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_paged_attention_over_the_stores_blocks_is_that_of_the_contiguous_window(
    model: edgekv.Model, text: list[int], name: str
) -> None:
    """The same keys and values: by block table where the store keeps them, in a row where the graphs read them."""
    store, tokens = model.prefix_store, text[:50]
    assert store is not None
    list(model.generate(tokens, 1, cache_salt="paged"))
    geometry, new = model.bundle.manifest.geometry, 7 if name == "prefill" else 1
    heads, width, past = geometry.kv_heads, geometry.head_dim, len(tokens) - new
    held = (model.cache.arena.array[: 2 * heads, model.cache.held_rows()].astype(np.float32) - 128) * np.float32(0.02)
    match = store.match(tokens, "paged")
    table = range(len(match.rows[0]))
    blocks = np.zeros((len(table), 2 * heads, STEP, width), np.float32)
    for held_block, rows in zip(blocks, match.rows[0], strict=True):
        held_block[:, : rows.shape[1]] = rows[: 2 * heads]
    blocks = ((blocks - 128) * np.float32(0.02)).reshape(len(table), 2, heads, STEP, width)
    query = np.random.default_rng(0).standard_normal((new, 2 * heads, width)).astype(np.float32)
    wanted = np.empty_like(query)
    for head in range(2 * heads):
        logits = query[:, head] @ held[head // 2].T / np.sqrt(width)
        logits[np.triu(np.ones((new, len(tokens)), bool), past + 1)] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        wanted[:, head] = weights / weights.sum(-1, keepdims=True) @ held[heads + head // 2]
    key, value = held[:, past:].reshape(2, heads, new, width).transpose(0, 2, 1, 3).reshape(2, new, -1)
    output, _ = paged_attention(
        query.reshape(new, -1),
        np.ascontiguousarray(key),
        np.ascontiguousarray(value),
        blocks[:, 0].copy(),
        blocks[:, 1].copy(),
        np.array([past], np.int32),
        np.array([0, new], np.int32),
        np.arange(len(table), dtype=np.int32),
        np.array([0, len(table)], np.int32),
    )
    np.testing.assert_allclose(output, wanted.reshape(new, -1), rtol=0, atol=1e-5)


def test_a_turn_reuses_the_turns_before_it_to_the_token(model: edgekv.Model, bundle: Path, text: list[int]) -> None:
    first = model.generate(text[:21], 9, cache_salt="chat")
    history = [*first.prompt, *_ids(first)]
    second = model.generate([*history, *text[30:37]], 5, cache_salt="chat")
    assert _ids(second) == _ids(_load(bundle).generate([*history, *text[30:37]], 5))
    assert second.stats.cache.restored_tokens == len(history) - 1  # the last token was chosen, not run


def test_a_sequence_keeps_its_own_cache_and_takes_from_others(model: edgekv.Model, text: list[int]) -> None:
    list(model.generate(text[:40], 1, sequence=1, cache_salt="s"))
    own = model.generate(text[:50], 1, sequence=1, cache_salt="s")
    list(own)
    assert (own.stats.cache.reused_tokens, own.stats.cache.restored_tokens) == (40, 0)
    other = model.generate(text, 3, sequence=2, cache_salt="s")
    again = model.generate(text, 3, cache_salt="none")
    assert [token.id for pair in zip(other, again, strict=True) for token in pair][::2] == _ids(
        model.generate(text, 3, cache_salt="none")
    )
    assert (other.stats.cache.reused_tokens, other.stats.cache.restored_tokens) == (50, 50)


def test_a_generation_leaves_its_blocks_in_the_folder(bundle: Path, tmp_path: Path, text: list[int]) -> None:
    """At its end, not when the model is closed: a process may be killed before."""
    model = _load(bundle, prefix_cache=replace(CONFIG, disk_folder=tmp_path))
    list(model.generate(text[: 2 * STEP], 1))
    assert model.prefix_store is not None and model.prefix_store.stats.disk.blocks == 2
    found = _load(bundle, prefix_cache=replace(CONFIG, disk_folder=tmp_path)).generate(text, 1)
    list(found)
    assert found.stats.cache.restored_tokens == 2 * STEP


def test_beams_start_from_a_prefix_too(bundle: Path, model: edgekv.Model, text: list[int]) -> None:
    wanted = _load(bundle).generate(text, 6, num_beams=3)
    list(model.generate(text[:37], 1, cache_salt="b"))
    found = model.generate(text, 6, num_beams=3, cache_salt="b")
    assert [each.tokens for each in found.sequences] == [each.tokens for each in wanted.sequences]
    assert found.stats.restored_tokens == 37
    after = model.generate(text, 1, cache_salt="b")
    list(after)
    assert after.stats.cache.restored_tokens == len(text) - 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", variants(["sliding-window", "sinks(4, 60)", "keydiff(64)"], ["sinks(4, 60)"]))
def test_what_is_no_prefix_any_more_is_not_stored(bundle: Path, text: list[int], policy: str) -> None:
    """All blocks that a long generation leaves hold what plain prefill computes, and reuse changes nothing."""
    model = _load(bundle, policy=policy, prefix_cache=CONFIG)
    context = model.bundle.manifest.context
    first = model.generate(text[:40], context + 20, temperature=1.0, seed=3)
    tokens = [*first.prompt, *_ids(first)]
    store = model.prefix_store
    assert store is not None
    match = store.match(tokens)
    assert context - 32 - STEP <= match.tokens <= context
    plain = _load(bundle)
    list(plain.generate(tokens[: match.tokens], 1))
    rows = np.concatenate(match.rows[0], axis=1)[:, : match.tokens].astype(int)
    assert np.abs(rows - plain.cache.arena.array[:, plain.cache.held_rows()]).max() <= 2
    for length in (50, context - 20, context + 10):
        anew = _load(bundle, policy=policy)
        warm, cold = (m.generate(tokens[:length], 4) for m in (model, anew))
        assert_same_or_tied(_ids(warm), _ids(cold), tokens[:length], anew, ROW_STEPS)
        assert warm.stats.cache.restored_tokens > 0


def _cli(capsys: pytest.CaptureFixture[str], bundle: Path, *options: str) -> dict[str, Any]:
    command = ["generate", str(bundle), "--prompt", PROMPT, "--max-new-tokens", "4", "--threads", "1", "--json"]
    assert run([*command, *options]) == 0
    output: dict[str, Any] = json.loads(capsys.readouterr().out)
    return output


PROMPT = "import os\n\ndef read_file(path):\n    with open(path) as file:\n        return file.read()\n"


@pytest.mark.slow
def test_processes_share_a_folder(
    bundle: Path, model: edgekv.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--prefix-cache", str(tmp_path), "--cache-salt", "hidden-salt", "--tokens-per-block", "8")
    command = ["generate", str(bundle), "--prompt", PROMPT, "--max-new-tokens", "4", "--threads", "1", "--json"]
    child = subprocess.run([sys.executable, "-m", "edgekv", *command, *options], capture_output=True)
    assert child.returncode == 0, child.stderr.decode()
    cold, warm = json.loads(child.stdout), _cli(capsys, bundle, *options)
    assert_same_or_tied(warm["tokens"], cold["tokens"], cold["prompt_tokens"], model, ROW_STEPS)
    assert cold["stats"]["cache"]["restored_tokens"] == 0
    assert warm["stats"]["cache"]["restored_tokens"] == len(warm["prompt_tokens"]) - 1
    prefix = warm["stats"]["prefix"]
    assert (prefix["hits"], prefix["misses"], prefix["rejected_files"]) == (1, 0, 0)
    assert prefix["disk"]["bytes_out"] > 0
    assert b"hidden-salt" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not [path for path in tmp_path.rglob("*") if "hidden-salt" in path.name]
    assert _cli(capsys, bundle, *options[:3], "other", *options[4:])["stats"]["cache"]["restored_tokens"] == 0


@pytest.mark.slow
def test_a_damaged_file_is_counted_and_never_used(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--prefix-cache", str(tmp_path), "--tokens-per-block", "8")
    cold = _cli(capsys, bundle, *options)
    for path in tmp_path.rglob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        raw[-200] ^= 1
        path.write_bytes(raw)
    damaged = _cli(capsys, bundle, *options)
    assert damaged["tokens"] == cold["tokens"]
    assert damaged["stats"]["cache"]["restored_tokens"] == 0
    assert damaged["stats"]["prefix"]["rejected_files"] >= 1
    assert _cli(capsys, bundle, *options)["stats"]["cache"]["restored_tokens"] > 0


@pytest.mark.slow
def test_a_folder_is_listed_and_cleared(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prefix-cache", str(tmp_path), "--tokens-per-block", "8")
    cold = _cli(capsys, bundle, *options)
    _cli(capsys, bundle, "--cache-salt", "tenant", *options)
    assert run(["prefix", "ls", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    listed = printed["prefixes"]
    assert printed["schema"] == 1
    assert [each["tokens"] for each in listed] == [len(cold["prompt_tokens"]) + 3] * 2
    assert sum(each["bytes"] for each in listed) == sum(p.stat().st_size for p in tmp_path.rglob("*.safetensors"))
    assert run(["prefix", "rm", str(tmp_path), listed[0]["id"]]) == 0
    assert f"removed {listed[0]['id']}" in capsys.readouterr().out
    assert run(["prefix", "rm", str(tmp_path), "--all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prefixes"] == listed[1:]
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.fixture
def own_bundle(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


@pytest.mark.slow
def test_a_baked_prefix_is_used_without_being_asked_for(
    own_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cold = _cli(capsys, own_bundle)
    assert cold["stats"]["prefix"] is None
    (tmp_path / "system.txt").write_text(PROMPT[:50])
    assert run(["prefix", "bake", str(own_bundle), str(tmp_path / "system.txt"), "--json"]) == 0
    baked = json.loads(capsys.readouterr().out)
    warm = _cli(capsys, own_bundle)
    assert warm["tokens"] == cold["tokens"]
    assert 0 < warm["stats"]["cache"]["restored_tokens"] <= baked["tokens"]
    assert _cli(capsys, own_bundle, "--no-block-reuse")["stats"]["cache"]["restored_tokens"] == 0
    assert run(["prefix", "ls", str(own_bundle), "--json"]) == 0
    assert baked.pop("schema") == 1
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "prefixes": [baked]}
    assert run(["prefix", "rm", str(own_bundle), "system"]) == 0
    capsys.readouterr()
    assert _cli(capsys, own_bundle)["stats"]["prefix"] is None


def test_a_baked_prefix_that_was_changed_is_refused(own_bundle: Path, bundle: Path, tmp_path: Path) -> None:
    bake_prefix(own_bundle, PROMPT, "system")
    file = next((own_bundle / "prefixes").glob("*.safetensors"))
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(BundleError, match=r"system-cpu.safetensors: got a missing or changed file"):
        edgekv.load(own_bundle)
    file.write_bytes(raw)
    edgekv.load(own_bundle)
    other = Path(shutil.copytree(own_bundle, tmp_path / "other"))
    change_manifest(other, lambda content: content["encodings"]["logits"].update(scale=1.0))
    with pytest.raises(BundleError, match="got a prefix of another bundle"):
        edgekv.load(other)


@pytest.mark.parametrize("sequence", [None, 77])
@pytest.mark.parametrize("times", [1, 2])
def test_retention_reaches_the_store(model: edgekv.Model, text: list[int], sequence: int | None, times: int) -> None:
    """Also of a prompt that comes again, whose rows the sequence still has."""
    policy = RetentionPolicy((TokenRangeRetentionConfig(0, 32, 90),), decode_retention_priority=10)
    for _ in range(times):
        list(model.generate(text[:40], 12, sequence=sequence, cache_salt="retained", retention=policy))
    store = model.prefix_store
    assert store is not None
    blocks = {each.link.parent: each for each in store._memory}
    key, priorities = store.root("retained"), []
    while key in blocks:
        priorities.append(blocks[key].priority)
        key = blocks[key].link.key
    assert priorities == [90, 90, 35, 10]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache": CONFIG, "cache_mode": "disabled"}, "cache mode: got disabled with a prefix cache"),
        ({"prefix_cache": StoreConfig(max_bytes=7)}, "max_bytes: got 7 bytes"),
        ({"prefix_cache": PrefixStore(RowSpec(1, 1, 8, 64))}, "prefix_cache: got a store of another bundle"),
        ({"prefix_cache": __file__}, r"disk_folder .*test_reuse.py: got File exists"),
    ],
)
def test_stores_that_cannot_be_are_refused(bundle: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _load(bundle, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "{}", "--prompt", "x", "--cache-salt", "s"], "--cache-salt: got one without a prefix cache"),
        (["generate", "{}", "--prompt", "x", "--host-cache-size", "9"], "--host-cache-size: got no --prefix-cache"),
        (
            ["generate", "{}", "--prompt", "x", "--prefix-cache", "x", "--free-memory-fraction", "2"],
            "--free-memory-fraction: got 2.0; expected above 0, at most 1",
        ),
        (["generate", "{}", "--prompt", "x", "--retention", "5"], "--retention: got '5'"),
        (["generate", "{}", "--prompt", "x", "--retention", "0-9:101"], "priority: got 101; expected 0 to 100"),
        (["prefix", "bake", "{}", "nowhere.txt"], "TEXT: got nowhere.txt"),
        (["prefix", "rm", "{}", "nothing"], "got 'nothing'; expected a baked prefix"),
        (["prefix", "rm", "{}"], "PREFIX, --all: got neither"),
        (["prefix", "ls", "nowhere"], "nowhere: got no folder"),
    ],
)
def test_command_lines_that_cannot_be_are_refused(
    bundle: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run([argument.format(bundle) for argument in arguments]) == 2
    assert message in capsys.readouterr().err
