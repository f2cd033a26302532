"""Several generations in one pass: each has the text and the cache that it has alone."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgekv
from edgekv import SamplingParams
from edgekv.draft import Speculation
from edgekv.engine import Engine, Generation, Request, Sequence
from edgekv.engine.beam_search import Hypothesis
from edgekv.errors import UsageError
from edgekv.kv import CacheState
from edgekv.serve import ServeOptions
from edgekv.text import Token
from tests.support.bundles import separate
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported
from tests.support.serving import NAME, served

CONTEXT = 64
random = np.random.default_rng(5)
PROMPTS = [random.integers(10, 300, length).tolist() for length in (9, 3, 14, 6, 11)]
GREEDY = SamplingParams(max_new_tokens=9, ignore_eos=True)
PARAMS = [GREEDY, GREEDY.overlaid(max_new_tokens=5, temperature=0.9, seed=7)]


SHAPE: dict[str, Any] = {"context": (32, CONTEXT), "ar": (1, 8), "draft_rows": (3, 8)}


@pytest.fixture(scope="module")
def verifying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with graphs that verify 3 and 8 tokens in contexts of 32 and 64."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("verifying") / "checkpoint")
    return exported(checkpoint, export_options(**SHAPE))


def start(model: edgekv.Model, number: int) -> Generation:
    return model.generate(PROMPTS[number], PARAMS[number % 2], sequence=number)


def add(model: edgekv.Model, number: int) -> Sequence:
    return model.engine.add(Request(tuple(PROMPTS[number]), PARAMS[number % 2], cache=number))


def step(engine: Engine, found: dict[Sequence, list[int]]) -> None:
    """Add the tokens of a step."""
    for sequence, event in engine.step():
        assert isinstance(event, Token)
        found.setdefault(sequence, []).append(event.id)


def state(model: edgekv.Model, number: int) -> CacheState:
    session = model.sequences.get(number)
    assert session is not None
    return session.cache.state


def same(found: CacheState, expected: CacheState) -> bool:
    rows = expected.rows
    return found.positions == expected.positions and all(np.array_equal(found.rows[name], rows[name]) for name in rows)


def test_a_batch_has_the_graph_of_the_max_tokens_and_the_largest_context(verifying: Path) -> None:
    with edgekv.load(verifying) as model:
        graph = model.engine.graphs.largest_verify()
        assert (graph.ar, graph.record.context) == (8, CONTEXT)


@pytest.mark.htp
@pytest.mark.parametrize(
    ("name", "strategy", "window", "key_layout"),
    [
        ("dense", "slot", None, "rows"),
        ("dense", "slot", None, "columns"),
        pytest.param("dense", "pointer-shift", None, "columns", marks=pytest.mark.thorough),
        pytest.param("lfm2", "slot", None, "rows", marks=pytest.mark.thorough),
        pytest.param("lfm2", "mirror", None, "rows", marks=pytest.mark.thorough),
        pytest.param("lfm3", "slot", 56, "rows", marks=pytest.mark.thorough),
        ("lfm3", "pointer-shift", 16, "columns"),
    ],
)
def test_each_text_and_cache_is_that_of_a_run_alone(
    verifying: Path, tmp_path: Path, name: str, strategy: str, window: int | None, key_layout: str
) -> None:
    """Also of a model with states, which are an input of the pass, and with attention windows, which texts outgrow."""
    bundle = verifying
    if (name, key_layout) != ("dense", "rows"):
        config = {} if name == "dense" else ARCHITECTURES[name]
        config = config | ({} if window is None else {"sliding_window": window})
        checkpoint = write_checkpoint(tmp_path / "checkpoint", config, gain=1.0)
        bundle = exported(checkpoint, export_options(**SHAPE, key_layout=key_layout))
    with edgekv.load(bundle, "htp", kv_update=strategy) as model:
        alone = [[token.id for token in start(model, number)] for number in range(5)]
        wanted = [state(model, number) for number in range(5)]
        model.sequences.clear()
        engine = model.engine
        engine.shares_passes = True
        added, found = [add(model, number) for number in range(4)], dict[Sequence, list[int]]()
        while engine.running or engine.waiting:
            step(engine, found)
            if len(added) == 4 and len(found[added[0]]) == 3:
                added.append(add(model, 4))  # joins later
        assert [found[each] for each in added] == alone
        assert all(same(state(model, number), wanted[number]) for number in range(5))
        passes, rows = model.batch.passes, model.batch.rows
        assert (passes >= 8 and rows > 3 * passes) if window != 16 else 0 < passes < rows


@pytest.mark.htp
@pytest.mark.parametrize("strategy", ["slot", "mirror"])
def test_beams_share_passes_where_the_window_has_room_for_all(verifying: Path, strategy: str) -> None:
    """With the scores of beams that run apart, to the bit."""
    with edgekv.load(verifying, "htp", kv_update=strategy) as model:
        for prompt, steps in ((PROMPTS[0], 5), ([*range(10, 60)], 3 * 5)):
            result = model.generate(prompt, 6, num_beams=3, num_return_sequences=3)
            found = tuple(Hypothesis(sequence.tokens, sequence.score) for sequence in result.sequences)
            assert found == separate(model, prompt, 3, 6)
            assert result.stats.steps == steps + -(-len(prompt) // 8)


@pytest.mark.htp
def test_sequences_without_room_beside_others_run_by_themselves(verifying: Path) -> None:
    prompts = [random.integers(10, 300, 25).tolist() for _ in range(3)]
    with edgekv.load(verifying, "htp") as model:
        alone = [[token.id for token in model.generate(each, 4, ignore_eos=True)] for each in prompts]
        params, found = SamplingParams(max_new_tokens=4, ignore_eos=True), dict[Sequence, list[int]]()
        model.engine.shares_passes = True
        added = [model.engine.add(Request(tuple(each), params, cache=at)) for at, each in enumerate(prompts)]
        while model.engine.running or model.engine.waiting:
            step(model.engine, found)
        assert [found[each] for each in added] == alone and model.batch.rows == 2 * model.batch.passes == 6


@pytest.mark.htp
def test_a_sequence_that_ran_alone_meanwhile_is_copied_again(verifying: Path) -> None:
    with edgekv.load(verifying, "htp") as model:
        alone = [[token.id for token in start(model, number)] for number in (0, 2)]
        engine, added, found = model.engine, [add(model, number) for number in (0, 2)], dict[Sequence, list[int]]()
        for number in range(9):
            engine.shares_passes = number % 3 > 0
            step(engine, found)
        copied = model.batch.bytes_copied
        assert [found[each] for each in added] == alone and copied > 0
        again, other = add(model, 0), add(model, 1)  # the sequence starts over in the same session
        for _ in range(3):
            step(engine, found)
        assert found[again] == alone[0][:3] and len(found[other]) == 3


@pytest.mark.htp
def test_what_cannot_share_a_pass_is_refused_by_name(verifying: Path, tmp_path: Path) -> None:
    plain = exported(write_checkpoint(tmp_path / "checkpoint"), export_options(context=(CONTEXT,), ar=(1, 8)))
    for bundle, engine, refusal in (
        (verifying, "cpu", "batch: got an engine whose sums depend on the columns"),
        (plain, "htp", "batch: got a bundle without verify graphs"),
    ):
        with edgekv.load(bundle, engine) as model, pytest.raises(UsageError, match=refusal):
            _ = model.batch
    growing = edgekv.load(verifying, "htp", kv_growth="together")
    with growing as model, pytest.raises(UsageError, match="batch: got a cache that grows"):
        _ = model.batch


@pytest.mark.thorough
@pytest.mark.htp
def test_serve_advances_clients_together_and_says_so(verifying: Path) -> None:
    with edgekv.load(verifying, "htp") as model:
        alone = [[token.text for token in model.generate(each, GREEDY)] for each in PROMPTS[:3]]
    with served(verifying, engine="htp", batches=True) as server, ThreadPoolExecutor(3) as clients:

        def ask(prompt: list[int]) -> str:
            body = {"ignore_eos": True}
            answer = server.client().completions.create(model=NAME, prompt=prompt, max_tokens=9, extra_body=body)
            return answer.choices[0].text

        assert list(clients.map(ask, PROMPTS[:3])) == ["".join(each) for each in alone]
        (found,) = re.findall(r"^edgekv_batch_passes_total (\d+)$", server.get("/metrics"), re.MULTILINE)
        assert int(found) >= 4


def test_serve_refuses_what_cannot_share_a_pass(verifying: Path) -> None:
    with pytest.raises(UsageError, match="batch: got an engine"), served(verifying, engine="cpu", batches=True):
        pass
    with pytest.raises(UsageError, match="batch: got passes of several answers with --speculate"):
        ServeOptions(batches=True, speculate=Speculation("lookup"))
