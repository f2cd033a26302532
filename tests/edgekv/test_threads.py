"""One model, several threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weakref import ref

import numpy as np
import pytest

import edgekv
from edgekv.errors import UsageError
from edgekv.prefix import PrefixStore, StoreConfig
from tests.support.bundles import endless

THREADS, CALLS = 8, 200
CONFIG = StoreConfig(tokens_per_block=4, max_bytes=1 << 22)
PATIENCE_S = 60


def _ids(model: edgekv.Model, prompt: list[int], sequence: int | None = None) -> list[int]:
    return [token.id for token in model.generate(prompt, 2, sequence=sequence)]


def _clear_prompts(model: edgekv.Model) -> dict[tuple[int, ...], list[int]]:
    """Prompts with common beginnings, and their answers: the least doubtful ones, which no order of a sum changes."""
    random = np.random.default_rng(0)
    stem = random.integers(0, 250, 10).tolist()
    found = []
    for _ in range(60):
        prompt = stem[: random.integers(2, 10)] + random.integers(0, 250, 6).tolist()
        answer = _ids(model, prompt)
        best = np.sort(model.score([*prompt, answer[0]])[-2:], axis=-1)
        found.append(((best[:, -1] - best[:, -2]).min(), tuple(prompt), answer))
    return {prompt: answer for _, prompt, answer in sorted(found, reverse=True)[:12]}


@pytest.mark.thorough
@pytest.mark.slow
def test_threads_that_share_a_model_get_the_tokens_of_one_and_store_no_wrong_block(small_export: Path) -> None:
    expected = _clear_prompts(edgekv.load(small_export, threads=1, verify=False))
    prompts = list(expected)
    model = edgekv.load(small_export, threads=1, verify=False, prefix_cache=CONFIG)

    def call(number: int) -> bool:
        prompt = prompts[number % len(prompts)]
        sequence = None if number % 3 else number % 5
        return _ids(model, list(prompt), sequence) == expected[prompt]

    with ThreadPoolExecutor(THREADS) as threads:
        right = list(threads.map(call, range(THREADS * CALLS), chunksize=CALLS // 8))
    assert right.count(False) == 0
    store = model.prefix_store
    assert isinstance(store, PrefixStore)
    later = edgekv.load(small_export, threads=1, verify=False, prefix_cache=store)
    restored = 0
    for prompt, answer in expected.items():
        generation = later.generate(list(prompt), 2)
        assert [token.id for token in generation] == answer
        restored += generation.stats.cache.restored_tokens
    assert restored > 100


def _in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_a_call_waits_until_another_thread_ends_its_own(small_export: Path) -> None:
    model = edgekv.load(small_export, threads=1, verify=False)
    mine = model.generate([5, 6, 7], 4)
    next(mine)
    theirs: list[int] = []
    thread = _in_thread(lambda: theirs.extend(_ids(model, [5, 6, 7])))
    other = model.generate([5, 6, 7], 2, sequence=1)  # another cache, which nobody waits for
    assert [token.id for token in other]
    thread.join(0.2)
    assert thread.is_alive() and not theirs
    rest = [token.id for token in mine]
    thread.join(PATIENCE_S)
    assert len(rest) == 3 and len(theirs) == 2


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_generation_that_is_broken_off_keeps_nobody_waiting(small_export: Path, end: str) -> None:
    model = edgekv.load(small_export, threads=1, verify=False)
    mine = model.generate([5, 6, 7], 4)
    next(mine)
    theirs: list[int] = []
    thread = _in_thread(lambda: theirs.extend(_ids(model, [5, 6, 7])))
    if end == "close":
        mine.close()
        assert list(mine) == []
    else:
        del mine
        gc.collect()
    thread.join(PATIENCE_S)
    assert len(theirs) == 2


def test_what_a_thread_leaves_unfinished_at_its_end_is_taken_over(small_export: Path) -> None:
    model = edgekv.load(small_export, threads=1, verify=False)
    left = []
    _in_thread(lambda: left.append(model.generate([5, 6, 7], 4))).join(PATIENCE_S)
    assert len(_ids(model, [5, 6, 7])) == 2
    with pytest.raises(ValueError, match="used by a later call"):
        next(left[0])


def test_a_closed_model_ends_calls_and_refuses_later_ones(small_export: Path) -> None:
    with edgekv.load(small_export, threads=1, verify=False) as model:
        generation = model.generate([5, 6, 7], 4)
        next(generation)
        assert repr(model).endswith("on cpu, context 64>")
    for call in (lambda: next(generation), lambda: model.generate([5], 1), lambda: model.score([5])):
        with pytest.raises(UsageError, match=r"model: got a closed model; expected an open one"):
            call()
    model.close()
    assert repr(model).endswith("closed>")


def test_a_closed_model_closes_the_prefix_store_that_it_opened_but_not_the_callers(
    small_export: Path, tmp_path: Path
) -> None:
    def open_files() -> list[Path]:
        return [path for entry in Path("/proc/self/fd").iterdir() if tmp_path in (path := entry.resolve()).parents]

    owner = edgekv.load(small_export, threads=1, verify=False, prefix_cache=tmp_path / "store")
    edgekv.load(small_export, threads=1, verify=False, prefix_cache=owner.prefix_store).close()
    assert open_files()
    assert len(_ids(owner, [5, 6, 7])) == 2
    owner.close()
    assert not open_files()


def test_sequences_that_are_dropped_while_others_step_are_computed_again(small_export: Path) -> None:
    model = edgekv.load(endless(small_export), threads=1, verify=False)
    alone = [token.id for token in model.generate([5, 6, 7], 40)]
    running = True

    def drop() -> None:
        while running:
            model.sequences.drop(1)

    thread = _in_thread(drop)
    found = [[token.id for token in model.generate([5, 6, 7], 40, sequence=1)] for _ in range(5)]
    running = False
    thread.join(PATIENCE_S)
    assert all(len(tokens) == 40 and tokens[:2] == alone[:2] for tokens in found)


def test_what_the_garbage_collector_asks_for_in_a_step_waits_for_its_end(small_export: Path) -> None:
    engine, done = edgekv.load(small_export, threads=1, verify=False).engine, []

    def step() -> None:
        engine.defer(lambda: done.append("first"))
        assert done == []

    engine.locked(step)
    assert done == ["first"]
    engine.defer(lambda: done.append("second"))
    assert done == ["first", "second"]
    assert not engine.lock.locked()


@pytest.mark.parametrize(("error", "again"), [(OSError, []), (KeyboardInterrupt, ["again"])])
def test_deferred_work_that_fails_keeps_no_lock(
    small_export: Path, error: type[BaseException], again: list[str]
) -> None:
    """Such as Ctrl-C while a dropped call stores its prefix: what is left is done at the end of the next step."""
    engine, done = edgekv.load(small_export, threads=1, verify=False).engine, []
    failures = [error]

    def fails_once() -> None:
        if failures:
            raise failures.pop()
        done.append("again")

    def step() -> None:
        engine.defer(fails_once)
        engine.defer(lambda: done.append("second"))

    with pytest.raises(error):
        engine.locked(step)
    assert done == []
    thread = _in_thread(lambda: engine.locked(done.append, "step"))
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and done == ["step", *again, "second"]


def test_a_scoring_that_is_dropped_half_read_keeps_nobody_waiting(small_export: Path) -> None:
    model = edgekv.load(small_export, threads=1, verify=False)
    scoring = model.score_steps([5, 6, 7] * 8)
    next(scoring)
    theirs: list[int] = []
    thread = _in_thread(lambda: theirs.extend(_ids(model, [5, 6, 7])))
    thread.join(0.2)
    assert thread.is_alive() and not theirs
    del scoring
    gc.collect()
    thread.join(PATIENCE_S)
    assert len(theirs) == 2


def test_a_closed_model_names_itself_where_its_caches_were(small_export: Path) -> None:
    with edgekv.load(small_export, threads=1, verify=False) as model:
        before = model.is_reproducible, model.verify_rows
    for name in ("cache", "session", "sequences", "prefix_store", "draft_model", "batch"):
        with pytest.raises(UsageError, match="model: got a closed model"):
            getattr(model, name)
    assert (model.is_reproducible, model.verify_rows) == before and model.encode("x")


def test_a_closed_model_keeps_no_memory_for_those_who_still_hold_it(small_export: Path) -> None:
    model = edgekv.load(small_export, threads=1, verify=False)
    generation = model.generate([5, 6, 7], 4, sequence=3)
    assert len(list(generation)) == 4
    held = [
        ref(each) for each in (model.session.cache, model.sequences.get_or_create(3).cache, *model.engine.graphs.loaded)
    ]
    assert len(held) > 3
    model.close()
    gc.collect()
    assert [each() for each in held] == [None] * len(held)
    assert generation.stats.generated_tokens == 4
