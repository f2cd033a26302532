"""Drafted tokens that one pass checks: the text and the cache are those of plain decoding."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgekv
from edgekv import EdgeKVError, SamplingParams
from edgekv.bundle import open_bundle
from edgekv.draft import DraftTree, Speculation
from edgekv.engine import Generation
from edgekv.errors import UsageError
from edgekv.kv import CacheState
from tests.support.bundles import Oracle, with_drafts
from tests.support.checkpoints import ARCHITECTURES, NEWER, write_checkpoint
from tests.support.exports import export_options, exported
from tests.support.thorough import variants

CONTEXT = 64
PROMPT = [*range(40, 52)]
LONG = SamplingParams(max_new_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def verifying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with graphs that verify 3 and 8 tokens in contexts of 32 and 64."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("verifying") / "checkpoint")
    return exported(checkpoint, export_options(context=(32, CONTEXT), ar=(1, 8), draft_rows=(3, 8)))


def oracle(model: edgekv.Model, text: list[int], right: float = 1.0, seed: int = 0) -> tuple[Speculation, Oracle]:
    drafter = Oracle(text, model.bundle.manifest.model.vocab, seed, right)
    return Speculation(drafter=drafter), drafter


def same(found: CacheState, expected: CacheState) -> bool:
    """Whether caches hold the same tokens with the same bits."""
    rows = expected.rows
    return found.positions == expected.positions and all(np.array_equal(found.rows[name], rows[name]) for name in rows)


def test_the_bundle_has_graphs_of_all_logits_in_every_context(verifying: Path) -> None:
    manifest = open_bundle(verifying).manifest
    found = {graph.name: manifest.interface.graph(graph).outputs[-1].shape for graph in manifest.graphs}
    verify = {f"ar{ar}_cl{s}_verify": (1, ar, 320) for ar in (3, 8) for s in (32, CONTEXT)}
    assert verify.items() <= found.items() and manifest.graph("verify").ar == 8  # type: ignore[union-attr]


@pytest.mark.parametrize("rows", [1, 9])
def test_more_rows_than_prefill_has_are_refused(rows: int) -> None:
    with pytest.raises(EdgeKVError, match=f"--draft-rows: got {rows}; expected 2 to 8"):
        export_options(ar=(1, 8), context=CONTEXT, draft_rows=(rows,))


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, ()),
        ({"give_hidden": True}, (8, 16)),
        ({"give_hidden": True, "ar": (1, 8)}, (8,)),
        ({"give_hidden": True, "ar": (1, 4)}, (4,)),
        ({"give_hidden": True, "draft_rows": ()}, ()),
        ({"give_hidden": True, "draft_rows": (4,)}, (4,)),
    ],
)
def test_targets_of_drafters_verify_8_and_16_rows(changes: dict[str, Any], rows: tuple[int, ...]) -> None:
    assert export_options(**{"context": 64, "ar": (1, 32), **changes}).verify_rows == rows


class Fixed:
    """Proposes the same, whatever the text is."""

    name = "fixed"

    def __init__(self, draft: Any) -> None:
        self._draft = draft

    def propose(self, tokens: Sequence[int], k: int) -> Any:
        return self._draft

    def accepted(self, n: int) -> None:
        pass


@pytest.mark.parametrize(
    "draft",
    [[320], [-1], [5, 10**30], [7, 2**40, 9], DraftTree((5, 400, 6), (-1, -1, 1)), [np.int64(3), np.uint8(4)]],
    ids=repr,
)
def test_drafts_outside_of_the_vocabulary_are_dropped(verifying: Path, draft: Any) -> None:
    with edgekv.load(verifying) as model:
        plain = [token.id for token in model.generate(PROMPT, LONG)]
        with with_drafts(model, PROMPT, LONG, Speculation(drafter=Fixed(draft))) as generation:
            assert [token.id for token in generation] == plain


@pytest.mark.parametrize("draft", ["text", ["a", "b"], [1.5], 7, None, DraftTree(("x",), (-1,))], ids=repr)
def test_drafts_that_are_no_ids_are_refused(verifying: Path, draft: Any) -> None:
    with (
        edgekv.load(verifying) as model,
        with_drafts(model, PROMPT, LONG, Speculation(drafter=Fixed(draft))) as generation,
        pytest.raises(UsageError, match=r"drafter fixed: got .*; expected token ids"),
    ):
        list(generation)


def test_a_true_draft_brings_a_pass_of_tokens(verifying: Path) -> None:
    with edgekv.load(verifying) as model:
        plain = [token.id for token in model.generate(PROMPT, LONG)]
        speculation, drafter = oracle(model, PROMPT + plain)
        with with_drafts(model, PROMPT, LONG, speculation) as generation:
            assert [token.id for token in generation] == plain
        stats = generation.stats.speculation
    assert stats is not None and (stats.passes, stats.tokens, stats.accepted) == (5, 39, 34)
    assert drafter.told == [7, 7, 7, 7, 6]


@pytest.mark.parametrize(
    ("engine", "strategy"),
    [
        ("emulate", "slot"),  # what each strategy does with rejected rows is in test_kv_accept
        *product(["emulate", "exact16", "fast", "htp"], ["pointer-shift"]),  # test_htp compares strategies there
    ],
)
def test_text_and_cache_are_those_of_plain_decoding(verifying: Path, engine: str, strategy: str) -> None:
    options = {"engine": engine} if engine == "htp" else {"cpu_mode": engine}
    with edgekv.load(verifying, kv_update=strategy, **options) as model:
        for seed in [1] if engine == "htp" else range(2):  # 0 is greedy
            params = LONG.overlaid(temperature=0.9, seed=seed) if seed else LONG
            plain = [token.id for token in model.generate(PROMPT, params)]
            wanted = model.cache.state
            speculation, _ = oracle(model, PROMPT + plain, 0.8, seed)
            with with_drafts(model, PROMPT, params, speculation) as generation:
                assert [token.id for token in generation] == plain
            assert same(model.cache.state, wanted)
            assert generation.stats.speculation.accepted > 5  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.htp
@pytest.mark.parametrize(
    "name", variants(["gemma2", "gemma4", "granite", "olmo2", "qwen3", "lfm3", "qwen3_5"], ["gemma2", "lfm3"])
)
def test_no_operation_of_a_decoder_rounds_drafts_otherwise_on_the_htp(tmp_path: Path, name: str) -> None:
    """Caps of scores and logits, gates of heads and of channels, factors of layers; heads as rows, and heads alone."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[name], gain=1.0)
    bundle = exported(checkpoint, export_options(context=128, ar=(1, 8), draft_rows=(4, 8)))
    with edgekv.load(bundle, "htp") as model:
        plain = [token.id for token in model.generate(PROMPT, LONG)]
        wanted = model.cache.state
        speculation, _ = oracle(model, PROMPT + plain, 0.8)
        with with_drafts(model, PROMPT, LONG, speculation) as generation:
            assert [token.id for token in generation] == plain
        assert same(model.cache.state, wanted)
        assert generation.stats.speculation.accepted > 5  # type: ignore[union-attr]


SHAPES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "queries that share keys": ({}, "w8a16", {}),
    "keys of each query": ({"num_key_value_heads": 4, "tie_word_embeddings": False}, "w8a16", {}),
    "blocks of 64": ({"hidden_size": 128, "intermediate_size": 192}, "w4a16-lpbq64", {}),
    "parts, the first shared with prefill": ({}, "w4a16", {"splits": 2, "draft_rows": (8, 16)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", variants(["emulate", "exact16", "fast"], ["exact16"]))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_bits_of_a_single_step(tmp_path: Path, shape: str, mode: str) -> None:
    overrides, recipe, changes = SHAPES[shape]
    checkpoint = write_checkpoint(tmp_path / "checkpoint", {**NEWER, **overrides})
    bundle = exported(
        checkpoint, export_options(recipe, **{"context": 128, "ar": (1, 16), "draft_rows": (3, 8), **changes})
    )
    tokens = np.random.default_rng(0).integers(3, 250, 128).tolist()
    with edgekv.load(bundle, cpu_mode=mode) as model:
        session = model.session
        for rows in changes.get("draft_rows", (3, 8)):
            for held in (5, 63, 64, 100):
                session.reset()
                session.feed(tokens[:held])
                singles = [session.feed([token]).copy() for token in tokens[held : held + rows]]
                wanted = session.cache.state
                session.reset()
                session.feed(tokens[:held])
                found = [session.verify(tokens[held : held + 1], tokens[held + 1 : held + rows]).copy()]
                for token in tokens[held + 1 : held + rows]:
                    session.take([token])
                    found.append(session.pass_logits.copy())
                session.settle()
                assert np.array_equal(found, singles) and same(session.cache.state, wanted)


@pytest.mark.parametrize("stop", range(1, 9))
def test_leaving_in_the_middle_of_a_pass_leaves_the_cache_of_plain_decoding(verifying: Path, stop: int) -> None:
    def after(generation: Generation) -> CacheState:
        with generation:
            for _ in range(stop):
                next(generation)
        return model.cache.state

    with edgekv.load(verifying) as model:
        plain = [token.id for token in model.generate(PROMPT, LONG)]
        wanted = after(with_drafts(model, PROMPT, LONG, None))
        found = after(with_drafts(model, PROMPT, LONG, oracle(model, PROMPT + plain)[0]))
    assert found.positions == wanted.positions and len(found.positions) == len(PROMPT) + stop - 1


def test_two_sequences_take_turns_in_the_middle_of_passes(verifying: Path) -> None:
    other = [*range(90, 99)]
    with edgekv.load(verifying) as model:
        texts = {1: PROMPT, 2: other}
        plain = {id: [t.id for t in model.generate(text, LONG, sequence=id)] for id, text in texts.items()}
        model.sequences.clear()
        runs = {
            id: with_drafts(model, text, LONG, oracle(model, text + plain[id])[0], sequence=id)
            for id, text in texts.items()
        }
        found: dict[int, list[int]] = {1: [], 2: []}
        for _ in range(LONG.max_new_tokens):
            for id, run in runs.items():
                found[id].append(next(run).id)
        assert found == plain


def test_the_context_ends_where_it_ends_without_drafts(verifying: Path) -> None:
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    with edgekv.load(verifying) as model:
        generation = model.generate(PROMPT, params)
        plain = [token.id for token in generation]
        drafted = with_drafts(model, PROMPT, params, oracle(model, PROMPT + plain)[0])
        assert [token.id for token in drafted] == plain
        assert drafted.stop_reason == generation.stop_reason == "context"
        assert model.cache.length == CONTEXT


def test_a_processor_sees_what_it_sees_without_drafts(verifying: Path) -> None:
    def seen(speculation: Speculation | None) -> list[tuple[int, ...]]:
        calls: list[tuple[int, ...]] = []

        def processor(prompt: object, generated: list[int], logits: np.ndarray) -> np.ndarray:
            calls.append(tuple(generated))
            return logits

        text.clear()
        with with_drafts(model, PROMPT, LONG, speculation, processors=[processor]) as generation:
            for _ in range(11):
                text.append(next(generation).id)
        return calls

    text: list[int] = []
    with edgekv.load(verifying) as model:
        wanted, plain = seen(None), [*text]
        assert seen(oracle(model, PROMPT + plain)[0]) == wanted and text == plain


def test_a_sequence_that_is_recomputed_in_every_step_is_not_drafted(verifying: Path) -> None:
    with edgekv.load(verifying, cache_mode="disabled") as model:
        plain = [token.id for token in model.generate(PROMPT, 6, sequence=1)]
        params = SamplingParams(max_new_tokens=6)
        generation = with_drafts(model, PROMPT, params, oracle(model, PROMPT + plain)[0], sequence=1)
        assert [token.id for token in generation] == plain
        assert generation.stats.speculation.proposed == 0  # type: ignore[union-attr]


def test_an_old_bundle_without_such_graphs_decodes_as_before(small_export: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(small_export, tmp_path / "old")
    with edgekv.load(bundle) as model:
        plain = [token.id for token in model.generate(PROMPT, LONG)]
        generation = with_drafts(model, PROMPT, LONG, oracle(model, PROMPT + plain)[0])
        assert [token.id for token in generation] == plain
        stats = generation.stats.speculation
        assert stats is not None and stats.proposed == 0 and stats.tokens_per_pass == 1
