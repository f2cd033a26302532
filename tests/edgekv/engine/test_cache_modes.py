"""Caching modes and sequences on a real model."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

import edgekv
from edgekv.cli import run
from edgekv.engine import CacheMode
from edgekv.errors import MemoryBudgetError, UsageError
from edgekv.kv import KVCache
from edgekv.text import Token
from tests.support.bundles import endless

PROMPT = "import os\n\ndef read_file(path):\n"
NEW_TOKENS = 24


def _ids(tokens: Iterable[Token]) -> list[int]:
    return [token.id for token in tokens]


def _load(bundle: Path, mode: str = "always", engine: str = "cpu") -> edgekv.Model:
    return edgekv.load(bundle, engine, verify=False, cache_mode=mode, threads=1 if engine == "cpu" else None)


def _logits(model: edgekv.Model, prompt: list[int], more: list[int]) -> np.ndarray:
    """The logits after the prompt and after each further token, `[1 + len(more), V]`."""

    def force(prompt: Sequence[int], generated: Sequence[int], logits: np.ndarray) -> np.ndarray:
        forced = np.full_like(logits, -np.inf)
        forced[[*more, 0][len(generated)]] = 0
        return forced

    options = {"processors": [force], "return_logits": True, "ignore_eos": True}
    tokens = [*model.generate(prompt, 1 + len(more), **options)]
    assert _ids(tokens)[:-1] == more
    return np.stack([token.logits for token in tokens])


@pytest.fixture(scope="module")
def model(bundle: Path) -> edgekv.Model:
    return _load(bundle)


@pytest.fixture(scope="module")
def wanted(model: edgekv.Model) -> list[int]:
    """The greedy continuation with the cache."""
    return _ids(model.generate(PROMPT, NEW_TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "long-sequence-only(20)", "long-sequence-only(1000)", "adaptive"])
@pytest.mark.parametrize("sequence", [None, 5])
def test_every_mode_gives_the_same_tokens(bundle: Path, wanted: list[int], mode: str, sequence: int | None) -> None:
    generation = _load(bundle, mode).generate(PROMPT, NEW_TOKENS, sequence=sequence)
    assert _ids(generation) == wanted
    assert generation.stats.setup.cache_mode == mode or mode == "adaptive"


@pytest.mark.htp
def test_every_mode_gives_the_same_bits_on_the_htp(small_on_htp: Path) -> None:
    """From 30 tokens on, where another step of the prefill graph becomes necessary."""
    text = list(range(34))
    logits = [
        _logits(_load(small_on_htp, mode, "htp"), text[:30], text[30:])
        for mode in ("always", "disabled", "long-sequence-only(32)")
    ]
    assert logits[0].std() > 0
    assert all(np.array_equal(logits[0], other) for other in logits[1:])


@pytest.mark.slow
def test_without_a_cache_the_context_ends_where_it_ends_with_one(bundle: Path, model: edgekv.Model) -> None:
    prompt = model.encode(PROMPT) * 16
    prompt = prompt[: model.bundle.manifest.context - 3]
    for each in (model, _load(bundle, "disabled")):
        generation = each.generate(prompt, 10)
        assert len(list(generation)) == 4
        assert generation.stats.stop_reason == "context"


@pytest.mark.slow
def test_what_is_computed_is_counted(bundle: Path, model: edgekv.Model) -> None:
    n = len(model.encode(PROMPT))
    counted = {}
    for mode in ("always", f"long-sequence-only({n + 1})", "disabled"):
        generation = _load(bundle, mode).generate(PROMPT, 4)
        list(generation)
        counted[mode.partition("(")[0]] = generation.stats.cache.computed_tokens
    assert counted["always"] == n + 3
    assert counted["disabled"] == n + (n + 1) + (n + 2) + (n + 3)
    assert counted["long-sequence-only"] == n + (n + 1) + 2


def test_a_short_sequence_costs_no_memory_until_it_grows(bundle: Path, model: edgekv.Model, wanted: list[int]) -> None:
    n = len(model.encode(PROMPT))
    model = _load(bundle, f"long-sequence-only({n + 4})")
    generation = model.generate(PROMPT, NEW_TOKENS, sequence=1)
    tokens = [next(generation).id for _ in range(5)]
    assert len(model.sequences) == 0
    tokens += _ids(generation)
    assert tokens == wanted
    assert model.sequences.ids == [1]
    list(model.generate(PROMPT, 1, sequence=1))
    assert len(model.sequences) == 0


def test_a_conversation_goes_on_where_it_ended(model: edgekv.Model) -> None:
    model.sequences.clear()
    first = model.generate(PROMPT, 10, sequence=1)
    answer = _ids(first)
    turn = [*first.prompt, *answer, *model.encode("\n    return ")]
    second = model.generate(turn, 10, sequence=1)
    tokens = _ids(second)
    assert second.stats.cache.reused_tokens == len(first.prompt) + len(answer) - 1  # the last one was never run
    assert second.stats.cache.computed_tokens == len(turn) - second.stats.cache.reused_tokens + 9
    assert tokens == _ids(model.generate(turn, 10))


def test_an_answer_can_be_asked_for_again(bundle: Path) -> None:
    """The same prompt, and one that departs from it: the common beginning is kept, the rest is dropped."""
    model = _load(bundle)
    prompt = model.encode(PROMPT)
    other = [*prompt[:-3], *model.encode("(name)")]
    first = _ids(model.generate(prompt, 4, sequence=1))
    again = model.generate(prompt, 4, sequence=1)
    assert _ids(again) == first
    assert again.stats.cache.reused_tokens == len(prompt) - 1
    departed = model.generate(other, 4, sequence=1)
    tokens = _ids(departed)
    assert departed.stats.cache.reused_tokens == len(prompt) - 3
    assert tokens == _ids(model.generate(other, 4))


def test_a_conversation_goes_on_beyond_a_sliding_window(bundle: Path) -> None:
    model = edgekv.load(bundle, policy="sliding-window", threads=1)
    context = model.bundle.manifest.context
    first = model.generate(PROMPT, context, sequence=1)
    held = [*first.prompt, *_ids(first)]
    more = model.generate([*held, 5], 2, sequence=1)
    assert len(list(more)) == 2
    assert more.stats.cache.reused_tokens == len(held) - 1
    afresh = model.generate([*held[:-9], 5], 2, sequence=1)
    list(afresh)
    assert afresh.stats.cache.reused_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("kv_update", ["slot", "pointer-shift"])
def test_sequences_take_turns(bundle: Path, kv_update: str) -> None:
    _take_turns(edgekv.load(bundle, kv_update=kv_update, verify=False))


@pytest.mark.htp
def test_sequences_take_turns_on_the_htp(small_on_htp: Path) -> None:
    _take_turns(edgekv.load(endless(small_on_htp), "htp", kv_update="pointer-shift", verify=False))


def _take_turns(model: edgekv.Model) -> None:
    prompts = [PROMPT, "class Reader:\n", "The module "]
    alone = [_ids(model.generate(prompt, 4)) for prompt in prompts]
    together = [model.generate(prompt, 4, sequence=i) for i, prompt in enumerate(prompts[:2])]
    together.append(model.generate(prompts[2], 4))
    mixed = [[next(generation).id for generation in together] for _ in range(4)]
    assert [list(tokens) for tokens in zip(*mixed, strict=True)] == alone
    prefill = [-(-len(generation.prompt) // model.cache.ar[-1]) for generation in together]
    assert [generation.stats.times.steps for generation in together] == [steps + 3 for steps in prefill]


def test_a_cache_of_other_sizes_is_not_used(model: edgekv.Model) -> None:
    other = KVCache(model.cache.geometry.in_context(64), ar=model.cache.ar)
    with pytest.raises(ValueError, match=r"cache: got .*window=64"):
        model.engine.graphs.use(other)


def test_a_later_call_ends_an_earlier_one_of_its_sequence_alone(model: edgekv.Model) -> None:
    mine, other, own = (model.generate(PROMPT, 3, sequence=s) for s in (1, 2, None))
    for generation in (mine, other, own):
        next(generation)
    model.generate(PROMPT, 3, sequence=1)
    with pytest.raises(ValueError, match="used by a later call"):
        next(mine)
    assert len(list(other)) == len(list(own)) == 2


def test_a_sequence_that_gave_way_is_computed_anew(bundle: Path, wanted: list[int]) -> None:
    size_bytes = _load(bundle).cache.stats.bytes_held
    model = edgekv.load(bundle, threads=1, verify=False, cache_mode=CacheMode("adaptive", budget=size_bytes))
    one = model.generate(PROMPT, NEW_TOKENS, sequence=1)
    tokens = [next(one).id for _ in range(5)]
    memory = weakref.ref(model.sequences.get_or_create(1).cache)
    two = model.generate(PROMPT, NEW_TOKENS, sequence=2)
    assert memory() is None  # neither the bindings nor the generation keep it
    assert _ids(two) == wanted
    assert tokens + _ids(one) == wanted
    assert model.sequences.ids == [1]
    assert model.sequences.stats.evictions == 2
    assert one.stats.cache.computed_tokens > NEW_TOKENS + len(one.prompt)


def test_a_sequence_beyond_the_budget_is_refused_before_anything_runs(bundle: Path) -> None:
    for mode in (CacheMode("adaptive", free_bytes=lambda: 1000), "always(1000)"):
        model = edgekv.load(bundle, threads=1, verify=False, cache_mode=mode)
        with pytest.raises(MemoryBudgetError, match="expected at most "):
            model.generate(PROMPT, 1, sequence=1)
        assert model.cache.stats.steps == 0
        assert len(list(model.generate(PROMPT, 1))) == 1  # the model's own cache is there from the start


@pytest.mark.slow
def test_the_command_line_has_the_mode(bundle: Path, wanted: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(bundle), "--prompt", PROMPT, "--max-new-tokens", "5", "--cpu-mode", "emulate"]
    command.append("--cache-mode")
    assert run([*command, "disabled", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == wanted[:5]
    assert result["stats"]["setup"]["cache_mode"] == "disabled"
    assert run([*command, "long-sequence-only(99)"]) == 0
    assert "KV slot, long-sequence-only(99), " in capsys.readouterr().err
    assert run([*command, "often"]) == 2
    assert "--cache-mode: got 'often'; expected always" in capsys.readouterr().err
    assert run([*command, "disabled", "--context-policy", "sliding-window"]) == 2


def test_modes_that_cannot_be_are_refused(bundle: Path) -> None:
    with pytest.raises(UsageError, match="cache mode disabled: got the context policy sliding-window"):
        edgekv.load(bundle, policy="sliding-window", cache_mode="disabled", verify=False)
    with pytest.raises(UsageError, match="sequence: got -1"):
        _load(bundle, "disabled").generate(PROMPT, sequence=-1)


@pytest.mark.parametrize("mode", ["disabled", "long-sequence-only(40)"])
def test_scores_are_those_of_the_text_whatever_is_recomputed_between_their_pieces(
    small_export: Path, mode: str
) -> None:
    model, text = _load(small_export, mode), [5, 9, 13, 7, 21, 3, 8, 11] * 5
    alone = model.score(text)
    scoring, found = model.score_steps(text), []
    for rows in scoring:
        found.append(rows)
        assert len([*model.generate([30, 4, 17], 2, sequence=1, ignore_eos=True)]) == 2
    assert len(found) > 2 and np.array_equal(np.concatenate(found), alone)
