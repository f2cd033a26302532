"""The engine: requests are queued, advanced by steps and ended, and each has the tokens that it has alone."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgekv
from edgekv import SamplingParams
from edgekv.draft import Speculation
from edgekv.engine import DEFAULT_CACHE, Engine, Request, Scores, Sequence, Status
from edgekv.engine.runner import Runner
from edgekv.errors import EngineError, UsageError
from edgekv.prefix import StoreConfig
from edgekv.text import Token
from tests.support.bundles import endless
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported

PARAMS = SamplingParams(max_new_tokens=6)
PROMPTS = [tuple(np.random.default_rng(seed).integers(5, 250, 4 + 5 * seed).tolist()) for seed in range(6)]
STORE = StoreConfig(tokens_per_block=4, max_bytes=1 << 22)


@pytest.fixture(scope="module")
def bundle(small_export: Path) -> Path:
    return endless(small_export)


@pytest.fixture
def model(bundle: Path) -> Any:
    """Whose answers do not depend on what is cached."""
    with edgekv.load(bundle, threads=1, reproducible=True, prefix_cache=STORE, verify=False) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def alone(bundle: Path) -> dict[tuple[int, ...], list[int]]:
    with edgekv.load(bundle, threads=1, reproducible=True, verify=False) as loaded:
        return {prompt: [token.id for token in loaded.generate(prompt, PARAMS)] for prompt in PROMPTS}


def request(number: int, **options: Any) -> Request:
    return Request(PROMPTS[number], PARAMS, **options)


def run(engine: Engine) -> dict[Sequence, list[int]]:
    """The tokens of all requests, to their end."""
    found: dict[Sequence, list[int]] = {}
    while engine.running or engine.waiting:
        for sequence, event in engine.step():
            assert isinstance(event, Token)
            found.setdefault(sequence, []).append(event.id)
    return found


def test_more_requests_than_caches_take_turns_in_the_order_of_their_arrival(model: edgekv.Model, alone: Any) -> None:
    engine = model.engine
    engine.max_sequences = 2
    added = [engine.add(request(number)) for number in range(6)]
    assert engine.step() and [*engine.running] == added[:2] and [*engine.waiting] == added[2:]
    found = run(engine)
    assert [each for each in found if each in added[2:]] == added[2:]
    assert all(found[each][-5:] == alone[each.request.tokens][-5:] for each in added)
    assert len(engine.pool) == 2 and engine.pool.taken == 0


def test_any_order_of_requests_steps_and_aborts_gives_each_its_own_tokens(model: edgekv.Model, alone: Any) -> None:
    engine, chance = model.engine, random.Random(7)
    engine.max_sequences = 3
    found: dict[Sequence, list[int]] = {}
    for _ in range(400):
        if chance.random() < 0.2 and len(engine.waiting) < 5:
            engine.add(request(chance.randrange(6), salt=chance.choice((None, "a"))))
        if chance.random() < 0.05 and (live := [*engine.running, *engine.waiting]):
            engine.abort(chance.choice(live))
        for sequence, event in engine.step():
            assert isinstance(event, Token)
            found.setdefault(sequence, []).append(event.id)
    for sequence, tokens in run(engine).items():
        found.setdefault(sequence, []).extend(tokens)
    whole = [each for each in found if each.stop_reason == "length"]
    assert len(whole) > 30 and len(found) > len(whole)
    assert all(tokens == alone[each.request.tokens][: len(tokens)] for each, tokens in found.items())
    assert engine.pool.taken == 0 and engine.holder(DEFAULT_CACHE) is None


def test_a_failing_step_ends_its_request_alone(
    model: edgekv.Model, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = model.engine
    broken, whole = engine.add(request(0)), engine.add(request(1))
    real = Runner.run

    def run(runner: Runner, sequence: Sequence, end: int | None = None) -> Any:
        if sequence is broken and len(sequence.output.tokens) == 2:  # type: ignore[union-attr]
            raise EngineError("engine", got="a fault", expected="a step", fix="Try again.")
        return real(runner, sequence, end)

    monkeypatch.setattr(Runner, "run", run)
    events = [each for _ in range(8) for each in engine.step()]
    assert [type(event) for sequence, event in events if sequence is broken] == [Token, Token, EngineError]
    assert [event.id for sequence, event in events if sequence is whole] == alone[PROMPTS[1]]  # type: ignore[union-attr]
    assert broken.has_ended and engine.pool.taken == 0


def test_a_request_that_cannot_begin_is_told_and_holds_nothing(model: edgekv.Model) -> None:
    with pytest.raises(UsageError, match="lora: got a bundle without slots"):
        model.engine.add(request(0, lora="calm"))
    model.engine.add(request(0, cache=1 << 70))
    ((sequence, event),) = model.engine.step()
    assert isinstance(event, UsageError) and sequence.has_ended
    assert not model.engine.running and not model.engine.waiting and model.engine.holder(1 << 70) is None


def test_a_later_call_displaces_the_one_that_has_its_cache(model: edgekv.Model) -> None:
    engine = model.engine
    first = model.generate([*PROMPTS[0]], PARAMS, sequence=3)
    assert next(first) and engine.holder(3) is first.sequence
    second = model.generate([*PROMPTS[0]], PARAMS, sequence=3)
    assert first.sequence.status is Status.DISPLACED and engine.holder(3) is second.sequence
    first.close()
    assert engine.holder(3) is second.sequence
    second.close()
    assert engine.holder(3) is None and second.sequence.status is Status.ENDED


def test_requests_that_pin_one_cache_run_one_after_another(model: edgekv.Model, alone: Any) -> None:
    engine = model.engine
    first, second, other = (engine.add(request(number, cache=cache)) for number, cache in ((0, 3), (1, 3), (2, 4)))
    engine.step()
    assert [*engine.running] == [first, other] and engine.holder(3) is first
    assert engine.step(second) == [] and second.status is Status.WAITING
    found = run(engine)
    assert found[second] == alone[PROMPTS[1]] and engine.pool.ids == [4, 3]


def test_one_sequence_is_advanced_beside_others_that_wait(model: edgekv.Model, alone: Any) -> None:
    engine = model.engine
    one, other = engine.add(request(0)), engine.add(request(1))
    events = [event for _ in range(6) for _, event in engine.step(one)]
    assert [event.id for event in events if isinstance(event, Token)] == alone[PROMPTS[0]]
    assert one.has_ended and engine.step(one) == [] and other.status is Status.WAITING
    assert run(engine)[other] == alone[PROMPTS[1]]


def test_equal_prompts_are_read_once(model: edgekv.Model, alone: Any) -> None:
    added = [model.engine.add(request(5)) for _ in range(3)]
    found = run(model.engine)
    assert all(found[each] == alone[PROMPTS[5]] for each in added)
    computed = [each.use.computed_tokens for each in added]
    assert computed[0] >= len(PROMPTS[5]) + 5 > computed[1] == computed[2]


def test_a_prompt_is_scored_before_its_answer(model: edgekv.Model, alone: Any) -> None:
    sequence = model.engine.add(request(3, scores=True))
    other = model.engine.add(Request(PROMPTS[2], scores=True))  # of the same cache: it waits
    events = [each for _ in range(40) for each in model.engine.step()]
    rows = [event.rows for each, event in events if each is sequence and isinstance(event, Scores)]
    np.testing.assert_array_equal(np.concatenate(rows), model.score(PROMPTS[3]))
    assert [event.id for each, event in events if each is sequence and isinstance(event, Token)] == alone[PROMPTS[3]]
    rows = [event.rows for each, event in events if each is other and isinstance(event, Scores)]
    assert len(np.concatenate(rows)) == len(PROMPTS[2]) and other.has_ended


@pytest.mark.parametrize(("speculation", "roles"), [(None, {"decode"}), (Speculation("lookup"), {"decode", "verify"})])
def test_graphs_that_a_request_can_run_are_loaded_when_it_begins(
    tmp_path: Path, speculation: Speculation | None, roles: set[str]
) -> None:
    """So that a graph that the engine refuses costs no work; its prompt of one token runs none for prefill."""
    bundle = exported(write_checkpoint(tmp_path), export_options(context=64, ar=(1, 8), draft_rows=(4,)))
    with edgekv.load(bundle, threads=1) as model:
        model.engine.add(Request((5,), PARAMS, speculation=speculation))
        model.engine.step()
        assert {graph.record.role for graph in model.engine.graphs._loaded.values()} == roles


@pytest.mark.parametrize(("length", "steps"), [(1, 1), (16, 1), (17, 2), (24, 2), (25, 3)])
def test_a_prompt_is_read_a_largest_step_at_a_time_and_its_last_two_with_the_first_token(
    model: edgekv.Model, length: int, steps: int
) -> None:
    engine, events = model.engine, list[Any]()
    engine.add(Request(tuple(range(5, 5 + length)), PARAMS))
    for _ in range(steps):
        assert events == []
        events = engine.step()
    assert len(events) == 1


def test_blocks_are_stored_before_layers_with_a_window_drop_them(tmp_path: Path) -> None:
    """A text that has only the first tokens of a longer one begins with their rows in all layers."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["gemma3"])
    bundle = exported(checkpoint, export_options(context=128, ar=(1, 8)))
    common, rest, other = [*range(5, 37)], [*range(40, 96)], [*range(100, 110)]
    with edgekv.load(bundle, threads=1, prefix_cache=STORE) as model:
        whole = model.generate(common + rest, 1, sequence=1)
        next(whole)
        assert whole.stats.times.steps == len(common + rest) // 8
        generation = model.generate(common + other, 1, sequence=2)
        next(generation)
        assert generation.stats.cache.restored_tokens == len(common)


def test_a_call_waits_for_one_of_another_thread_in_its_cache(model: edgekv.Model, alone: Any) -> None:
    begun, goes_on, found = threading.Event(), threading.Event(), dict[int, list[int]]()

    def first() -> None:
        generation = model.generate([*PROMPTS[0]], PARAMS, sequence=3)
        found[0] = [next(generation).id]
        begun.set()
        goes_on.wait(60)
        found[0] += [token.id for token in generation]

    def second() -> None:
        found[1] = [token.id for token in model.generate([*PROMPTS[1]], PARAMS, sequence=3)]

    one, other = threading.Thread(target=first), threading.Thread(target=second)
    one.start()
    assert begun.wait(60)
    other.start()
    other.join(0.5)  # it cannot end meanwhile
    goes_on.set()
    one.join(60)
    other.join(60)
    assert found == {0: alone[PROMPTS[0]], 1: alone[PROMPTS[1]]}
