"""The same prompt gives the same logits, whatever the caches have of it."""

from pathlib import Path

import numpy as np
import pytest

import edgekv
from edgekv.engine import Request
from edgekv.prefix import StoreConfig
from edgekv.text import SamplingParams
from tests.support.serving import served
from tests.support.thorough import variants

TEXT = "The standard library of Python has modules for files, numbers, text and networks. "
NEW = 8


def load(bundle: Path, **options) -> edgekv.Model:
    return edgekv.load(bundle, threads=1, verify=False, **{"cpu_mode": "fast", **options})


def answer(model: edgekv.Model, prompt: list[int], **options) -> tuple[list[int], np.ndarray]:
    """Tokens, and the logits of each."""
    found = list(
        model.generate(prompt, SamplingParams(max_new_tokens=NEW, ignore_eos=True), return_logits=True, **options)
    )
    return [token.id for token in found], np.stack([token.logits for token in found if token.logits is not None])


@pytest.fixture(scope="module")
def prompts(bundle: Path) -> list[list[int]]:
    """Prompts of several windows that share beginnings: two of a conversation, and one that leaves it."""
    model = load(bundle)
    text = model.encode(TEXT * 6)[:100]
    assert len(text) == 100
    first = text[:84]
    tokens, _ = answer(model, first)
    return [first, [*first, *tokens, *text[84:]], [*first[:75], *text[10:30]]]


def disturbed(model: edgekv.Model, prompts: list[list[int]], **options) -> list[tuple[list[int], np.ndarray]]:
    """The answers in two orders, so that each prompt finds something else in the caches."""
    for prompt in prompts:
        answer(model, prompt, **options)
    return [answer(model, prompt, **options) for prompt in reversed(prompts)][::-1]


def equal(one: list[tuple[list[int], np.ndarray]], other: list[tuple[list[int], np.ndarray]]) -> bool:
    return all(a == c and np.array_equal(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


def each_alone(bundle: Path, prompts: list[list[int]], **options) -> list[tuple[list[int], np.ndarray]]:
    """The answer to each prompt on a model of its own."""
    found = []
    for prompt in prompts:
        with load(bundle, reproducible=True, **options) as model:
            found.append(answer(model, prompt))
    return found


@pytest.fixture(scope="module")
def alone(bundle: Path, prompts: list[list[int]]) -> list[tuple[list[int], np.ndarray]]:
    return each_alone(bundle, prompts)


def test_without_it_logits_depend_on_what_is_cached(bundle: Path, prompts: list[list[int]], alone) -> None:
    with load(bundle) as model:
        assert not equal(disturbed(model, prompts, sequence=1), alone), "otherwise the option is not needed"


@pytest.mark.parametrize(
    "options",
    variants(
        [{}, {"kv_update": "pointer-shift"}, {"kv_update": "mirror"}, {"cpu_mode": "exact16"}],
        [{"kv_update": "pointer-shift"}, {"cpu_mode": "exact16"}],
    ),
)
def test_a_sequence_that_has_held_other_texts_gives_the_same_bits(bundle: Path, prompts, options) -> None:
    with load(bundle, reproducible=True, **options) as model:
        assert equal(disturbed(model, prompts, sequence=1), each_alone(bundle, prompts, **options))
        generation = model.generate(prompts[0], 1, sequence=1)
        list(generation)
        assert generation.stats.cache.reused_tokens >= model.engine.window > 0, "whole windows are reused"


def test_stored_prefixes_give_the_same_bits(bundle: Path, tmp_path: Path, prompts, alone) -> None:
    for _ in range(2):  # the second process finds what the first has stored
        with load(bundle, reproducible=True, prefix_cache=tmp_path) as model:
            assert equal(disturbed(model, prompts), alone)
            generation = model.generate(prompts[0], 1)
            list(generation)
            assert generation.stats.cache.restored_tokens == model.engine.window


def test_the_store_is_not_that_of_rows_which_depend_on_others(bundle: Path, tmp_path: Path, prompts) -> None:
    with load(bundle, prefix_cache=tmp_path) as model:
        answer(model, prompts[0])
    with load(bundle, reproducible=True, prefix_cache=tmp_path) as model:
        generation = model.generate(prompts[0], 1)
        list(generation)
        assert generation.stats.cache.restored_tokens == 0


def test_a_prompt_in_slices_and_beside_others_gives_the_same_bits(bundle: Path, prompts, alone) -> None:
    with load(bundle, reproducible=True) as model:
        params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
        found = {model.engine.add(Request(tuple(each), params, returns_logits=True)): [] for each in prompts}
        while model.engine.running or model.engine.waiting:
            for sequence, token in model.engine.step():
                found[sequence].append(token)
        got = [([token.id for token in each], np.stack([token.logits for token in each])) for each in found.values()]
        assert equal(got, alone)


def test_evicted_sequences_are_run_again_in_the_same_steps(bundle: Path, prompts, alone) -> None:
    with load(bundle, reproducible=True, cache_mode="adaptive") as model:
        params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
        running = model.generate(prompts[0], params, sequence=1, return_logits=True)
        taken = []
        for at in range(NEW):
            if at % 4 == 2:
                model.sequences.drop(1)
            taken.append(next(running))
        assert equal([([token.id for token in taken], np.stack([token.logits for token in taken]))], alone[:1])


def test_a_shared_store_in_memory_gives_the_same_bits(bundle: Path, prompts, alone) -> None:
    with load(bundle, reproducible=True, prefix_cache=StoreConfig()) as model:
        assert equal([answer(model, prompt, sequence=at) for at, prompt in enumerate(prompts)], alone)
        assert equal([answer(model, prompt, sequence=at + 9) for at, prompt in enumerate(prompts)], alone)


@pytest.mark.htp
def test_an_engine_whose_rows_are_alike_needs_no_windows(wide_on_htp: Path) -> None:
    with edgekv.load(wide_on_htp, "htp", reproducible=True) as model:
        assert model.engine.window == 0


def test_serve_says_whether_answers_are_reproducible(talking: Path) -> None:
    for reproducible in (False, True):
        with served(talking, cpu_mode="fast", reproducible=reproducible) as server:
            assert f"\nedgekv_reproducible {int(reproducible)}\n" in server.get("/metrics")
