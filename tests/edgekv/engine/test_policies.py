"""Context policies from their text to what a generation says of them, on the exported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

import edgekv
from edgekv.bundle import Bundle, TokenRecord, open_bundle
from edgekv.cli import run
from edgekv.errors import UsageError
from edgekv.kv import Fail, KeyDiff, Sinks, SlidingWindow
from edgekv.kv.policies.text import parse_policy
from tests.support.thorough import variants

PROMPT = "import os\n\ndef read_file(path):\n"
CONTEXT = 128
# All that the AR-32 graph leaves room for: 96 of 128 tokens.
SINKS, KEYDIFF = "sinks(4, 92)", "keydiff(96)"


@given(first=st.integers(0, 10**9), second=st.integers(0, 10**9), space=st.sampled_from(["", " "]))
def test_a_policy_is_read_with_its_numbers(first: int, second: int, space: str) -> None:
    assert parse_policy(f"sinks({first},{space}{second})", [0.5, 0.25]) == Sinks(first, second, (0.5, 0.25))
    assert parse_policy(f"keydiff({first},{space}{second}{space})", []) == KeyDiff(first, second)
    assert parse_policy(f"{space}keydiff({first}){space}", []) == KeyDiff(first, max(1, first // 8))


def test_a_policy_without_numbers_is_its_name() -> None:
    assert (parse_policy("fail", []), parse_policy("sliding-window", [])) == (Fail(), SlidingWindow())


BAD_FORMS = (
    *("", "forget", "Fail", "fail()", "fail(1)", "sliding-window(3)", "sinks", "sinks()", "sinks(4)", "sinks(4,)"),
    *("sinks(4,5,6)", "sinks(-4,5)", "sinks(4.0,5)", "sinks(4,5", "sinks 4,5", "keydiff", "keydiff()", "keydiff(a)"),
    *("keydiff(1,2,3)", "keydiff(1_0)", "keydiff(\u0664)", "keydiff((4))", f"keydiff({'9' * 5000})"),
)


@pytest.mark.parametrize("text", BAD_FORMS)
def test_other_texts_are_refused_with_all_forms(text: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_policy(text, [])
    assert str(refusal.value).startswith("context policy: got ")
    assert "expected fail, sliding-window, sinks(N, WINDOW), keydiff(BUDGET) or keydiff(BUDGET, RECENT)" in str(
        refusal.value
    )


def _load(bundle: Path, policy: str, **options: Any) -> edgekv.Model:
    opened = open_bundle(bundle, False)
    # No token ends a text, so that its length is what was asked for.
    endless = msgspec.structs.replace(opened.manifest, tokens=TokenRecord(bos=None, eos=[], pad=None))
    return edgekv.load(Bundle(opened.path, endless), policy=policy, threads=1, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kv_update", variants(["pointer-shift", "slot"], ["pointer-shift"]))
def test_sinks_go_on_to_three_contexts(bundle: Path, kv_update: str) -> None:
    model = _load(bundle, SINKS, kv_update=kv_update)
    generation = model.generate(PROMPT, 3 * CONTEXT, temperature=1.0, seed=7)
    for _ in generation:
        assert model.cache.positions == list(range(model.cache.length))
        assert model.cache.position <= CONTEXT
    stats = generation.stats
    assert (stats.stop_reason, stats.generated_tokens) == ("length", 3 * CONTEXT)
    assert model.cache.tokens_seen == len(generation.prompt) + 3 * CONTEXT - 1
    # Each time that the 128 rows are full, 96 tokens stay.
    assert stats.cache.evicted_tokens == model.cache.tokens_seen - model.cache.length
    assert stats.cache.evicted_tokens % (CONTEXT - 96) == 0
    cost = stats.cache.requantization
    assert cost is not None and cost.rms is not None
    sizes = model.bundle.manifest.model
    assert cost.keys == stats.cache.evicted_tokens // (CONTEXT - 96) * 92 * sizes.layers * sizes.kv_heads
    assert 0.2 < cost.rms_steps < 0.4
    scales = [encoding.scale for encoding in model.cache.encodings]
    assert min(scales) * cost.rms_steps < cost.rms < max(scales) * cost.rms_steps


@pytest.mark.slow
@pytest.mark.parametrize("kv_update", variants(["pointer-shift", "slot"], ["pointer-shift"]))
def test_keydiff_goes_on_to_three_contexts(bundle: Path, kv_update: str) -> None:
    model = _load(bundle, KEYDIFF, kv_update=kv_update)
    generation = model.generate(PROMPT, 3 * CONTEXT, temperature=1.0, seed=7)
    text = "".join(token.text for token in generation)
    stats = generation.stats
    assert text
    assert (stats.stop_reason, stats.generated_tokens) == ("length", 3 * CONTEXT)
    assert stats.cache.evicted_tokens == model.cache.tokens_seen - model.cache.length > CONTEXT
    assert stats.cache.requantization is None
    positions = model.cache.positions
    assert positions == sorted(set(positions))
    assert positions[-12:] == list(range(model.cache.tokens_seen - 12, model.cache.tokens_seen))


@pytest.mark.slow
@pytest.mark.parametrize("kv_update", variants(["pointer-shift", "slot"], ["pointer-shift"]))
def test_a_token_stands_where_the_cache_says_when_others_leave(bundle: Path, embedded: Path, kv_update: str) -> None:
    """Keys of the first layer depend on token and position alone: those held are those of a cache filled anew."""
    model = _load(bundle, SINKS, kv_update=kv_update)
    tokens = model.encode((embedded / "heldout.txt").read_text("utf-8")[:4000])[: CONTEXT + 1]
    for token in tokens:
        model.session.feed((token,))
    assert model.cache.stats.evicted == CONTEXT - 96
    found = _first_keys(model)
    fresh = _load(bundle, "fail", kv_update=kv_update)
    fresh.session.feed([*tokens[:4], *tokens[CONTEXT - 92 :]])
    off = np.abs(found - _first_keys(fresh))
    assert off[:, -1].max() <= 1  # the token whose step made room
    # Once rounded by the graph and once more where they were rotated; what the graph clipped turns with its error.
    assert (off <= 2).mean() > 0.999


def _first_keys(model: edgekv.Model) -> np.ndarray[Any, Any]:
    """Keys of layer 0, `[heads, tokens, D]`."""
    tensors = [at for at, each in enumerate(model.cache.arena.tensors) if (each.layer, each.kind) == (0, "key")]
    rows: np.ndarray[Any, Any] = model.cache.arena.array[tensors][:, model.cache.held_rows()].astype(int)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("policy", [SINKS, KEYDIFF])
def test_nothing_leaves_within_the_context(bundle: Path, policy: str) -> None:
    generations = [_load(bundle, each).generate(PROMPT, 40) for each in (policy, "fail")]
    assert [token.id for token in generations[0]] == [token.id for token in generations[1]]
    assert generations[0].stats.cache.evicted_tokens == 0


@pytest.mark.parametrize("policy", [SINKS, KEYDIFF, "sinks(1, 1)", "keydiff(1)"])
def test_a_prompt_longer_than_the_context_works(bundle: Path, embedded: Path, policy: str) -> None:
    model = _load(bundle, policy)
    prompt = model.encode((embedded / "heldout.txt").read_text("utf-8")[:4000])[: 2 * CONTEXT + 5]
    assert len(prompt) == 2 * CONTEXT + 5
    generation = model.generate(prompt, 4)
    assert len(list(generation)) == 4
    assert generation.stats.stop_reason == "length"
    assert generation.stats.cache.evicted_tokens == len(prompt) + 3 - model.cache.length > 0


def test_the_cache_gets_the_encodings_of_the_manifest(bundle: Path) -> None:
    model = _load(bundle, SINKS)
    manifest = model.bundle.manifest
    found = [(each.scale, each.zero_point) for each in model.cache.encodings]
    records = [manifest.encodings[tensor.past] for tensor in manifest.geometry.names()]
    assert found == [(record.scale, record.zero_point) for record in records]


def test_a_policy_may_be_an_object(bundle: Path) -> None:
    model = edgekv.load(bundle, policy=KeyDiff(64, 5), verify=False)
    assert model.cache.policy == "keydiff"


@pytest.mark.slow
def test_evicted_tokens_are_those_of_one_generation(bundle: Path) -> None:
    model = _load(bundle, "sinks(4, 40)")
    for sequence in (None, 1, 2):
        first = model.generate(PROMPT, CONTEXT, sequence=sequence)
        held = [*first.prompt, *(token.id for token in first)]
        more = model.generate([*held, 5], 3, sequence=sequence)
        assert len(list(more)) == 3
        reused = 0 if sequence is None else len(held) - 1
        assert more.stats.cache.reused_tokens == reused
        assert first.stats.cache.evicted_tokens > 0
        assert (more.stats.cache.evicted_tokens > 0) == (sequence is None)


def test_evictions_in_a_cache_made_anew_are_counted(bundle: Path) -> None:
    limit = _load(bundle, KEYDIFF).cache.stats.bytes_held
    model = _load(bundle, "keydiff(64)", cache_mode=f"adaptive({limit})")
    one = model.generate(PROMPT, 2 * CONTEXT, sequence=1)
    for _ in range(CONTEXT):
        next(one)
    evicted = one.stats.cache.evicted_tokens
    assert evicted > 0
    list(model.generate(PROMPT, 2, sequence=2))
    next(one)
    assert one.stats.cache.evicted_tokens >= 2 * evicted


@pytest.mark.htp
def test_the_emulator_of_the_htp_goes_on_too(wide_on_htp: Path) -> None:
    for policy in (SINKS, KEYDIFF):
        model = edgekv.load(wide_on_htp, "htp", policy=policy, verify=False)
        generation = model.generate([5] * CONTEXT, 4)
        assert len(list(generation)) == 4
        assert generation.stats.cache.evicted_tokens > 0
        assert model.cache.length <= CONTEXT


def _command(bundle: Path, policy: str, *options: str) -> list[str]:
    return ["generate", str(bundle), "--prompt", PROMPT, "--context-policy", policy, *options]


@pytest.mark.slow
@pytest.mark.parametrize("policy", variants([SINKS, KEYDIFF], [KEYDIFF]))
def test_the_command_line_shows_what_left(bundle: Path, policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(_command(bundle, policy, "--max-new-tokens", "150", "--json")) == 0
    stats = json.loads(capsys.readouterr().out)["stats"]
    assert stats["cache"]["evicted_tokens"] > 0
    assert (stats["cache"]["requantization"] is None) == (policy == KEYDIFF)
    assert run(_command(bundle, policy, "--max-new-tokens", "150")) == 0
    line = capsys.readouterr().err
    assert f", {stats['cache']['evicted_tokens']} tokens evicted" in line
    assert ("moved keys off by 0." in line) == (policy == SINKS)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("sinks(4, 96)", "sinks: got 4 first and 96 newest tokens; expected at least 1 of each, and 96 together"),
        ("sinks(0, 9)", "sinks: got 0 first and 9 newest tokens"),
        ("sinks(9, 0)", "sinks: got 9 first and 0 newest tokens"),
        ("keydiff(100)", "keydiff: got a budget of 100 tokens, 12 of them recent; expected 1 to 96 tokens"),
        ("keydiff(0)", "keydiff: got a budget of 0 tokens"),
        ("keydiff(9, 10)", "keydiff: got a budget of 9 tokens, 10 of them recent"),
        ("keydiff(9, 0)", "keydiff: got a budget of 9 tokens, 0 of them recent"),
        ("sinks", "got 'sinks'; expected fail, sliding-window, sinks(N, WINDOW)"),
    ],
)
def test_numbers_that_leave_no_room_are_refused(
    bundle: Path, policy: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(_command(bundle, policy)) == 2
    printed = capsys.readouterr()
    assert "error: --context-policy" in printed.err
    assert message in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("policy", [SINKS, KEYDIFF])
def test_what_would_not_come_out_the_same_is_refused(
    bundle: Path, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(_command(bundle, policy, "--cache-mode", "disabled")) == 2
    assert f"got the context policy {policy.partition('(')[0]}" in capsys.readouterr().err
    assert run(_command(bundle, policy, "--num-beams", "2")) == 2
    assert f"got {policy.partition('(')[0]} with num_beams" in capsys.readouterr().err
