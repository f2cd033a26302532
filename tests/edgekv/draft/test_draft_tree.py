"""Drafts that branch: the text and the cache are those of plain decoding."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import edgekv
from edgekv import SamplingParams
from edgekv.cli import run
from edgekv.draft import (
    AdaptiveDrafter,
    CorpusDrafter,
    CorpusIndex,
    DraftRecord,
    DraftTree,
    PromptLookup,
    Speculation,
    as_tree,
    build_index,
)
from edgekv.errors import UsageError
from edgekv.kv import CacheState
from edgekv.runtime import tree_rows
from edgekv.text import Grammar
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported

CONTEXT = 64
PROMPT = [*range(40, 52)]
LONG = SamplingParams(max_new_tokens=32, ignore_eos=True)
CHAINS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=4)


class Thicket:
    """Proposes the true continuation of a text among wrong ones, on a branch that is often not the first."""

    name = "thicket"

    def __init__(self, text: Sequence[int], vocab: int, seed: int = 0) -> None:
        self._text = list(text)
        self._vocab = vocab
        self._random = random.Random(seed)

    def propose(self, tokens: Sequence[int], k: int) -> DraftTree:
        chance, at = self._random, len(tokens)
        true = self._text[at : at + chance.randint(1, k)]
        chains = [true]
        for _ in range(chance.randint(0, 3)):
            common = chance.randint(0, len(true))
            chains.append([*true[:common], *(chance.randrange(self._vocab) for _ in range(chance.randint(1, 3)))])
        chance.shuffle(chains)
        return DraftTree.of(chains, k)

    def accepted(self, n: int) -> None:
        """Nothing to learn."""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model with graphs that verify 3 and 8 tokens in two contexts, by key layout."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("trees") / "checkpoint")
    shape = {"context": (32, CONTEXT), "ar": (1, 8), "draft_rows": (3, 8)}
    return {layout: exported(checkpoint, export_options(**shape, key_layout=layout)) for layout in ("rows", "columns")}


def same(found: CacheState, expected: CacheState) -> bool:
    """Whether caches hold the same tokens with the same bits."""
    rows = expected.rows
    return found.positions == expected.positions and all(np.array_equal(found.rows[name], rows[name]) for name in rows)


def compared(model: edgekv.Model, seeds: int) -> int:
    """Right drafts on branches, in texts that are the same as without drafts, as are the caches."""
    branched = 0
    for seed in range(seeds):
        params = LONG.overlaid(temperature=0.9, seed=seed) if seed else LONG
        plain = [token.id for token in model.generate(PROMPT, params)]
        wanted = model.cache.state
        drafts = Speculation(drafter=Thicket(PROMPT + plain, model.bundle.manifest.model.vocab, seed))
        generation = model.generate(PROMPT, params, speculate=drafts)
        assert [token.id for token in generation] == plain
        stats = generation.stats.speculation
        assert stats is not None and same(model.cache.state, wanted) and stats.accepted > 3
        branched += sum(each.branched for each in stats.drafters.values())
    return branched


@pytest.mark.slow
@pytest.mark.htp
@pytest.mark.parametrize(
    ("strategy", "layout"), [("slot", "columns"), pytest.param("pointer-shift", "rows", marks=pytest.mark.thorough)]
)
def test_branches_change_nothing_on_the_htp(bundles: dict[str, Path], strategy: str, layout: str) -> None:
    """What each strategy does with the rows of a branch is in test_kv_accept."""
    with edgekv.load(bundles[layout], "htp", kv_update=strategy) as model:
        assert compared(model, 2) > 3


@pytest.mark.parametrize(("strategy", "layout"), [("slot", "rows"), ("mirror", "columns")])
def test_the_cpu_checks_the_likeliest_branch_alone(bundles: dict[str, Path], strategy: str, layout: str) -> None:
    with edgekv.load(bundles[layout], kv_update=strategy) as model:
        assert compared(model, 2) == 0


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.htp
def test_each_layer_sees_its_own_window(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["gemma3"])
    bundle = exported(checkpoint, export_options(context=CONTEXT, ar=(1, 8), draft_rows=(8,)))
    with edgekv.load(bundle, "htp") as model:
        assert len(model.cache.groups) > 1 and compared(model, 1) > 0


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.htp
def test_lookup_and_a_corpus_branch(bundles: dict[str, Path], tmp_path: Path) -> None:
    prompt = [5, 6, 7, 8, 5, 6, 9, 5, 6]
    (tmp_path / "corpus").write_text("a b c a b d a b")
    with edgekv.load(bundles["rows"], "htp") as model:
        plain = [token.id for token in model.generate(prompt, LONG)]
        corpus = model.open_corpus(tmp_path / "corpus")
        for wanted in (
            Speculation("lookup", tree=True),
            Speculation("corpus", corpus=corpus, tree=True),
            Speculation(tree=True),
        ):
            assert [token.id for token in model.generate(prompt, LONG, speculate=wanted)] == plain


@pytest.mark.slow
@pytest.mark.htp
def test_the_commands_take_the_option(bundles: dict[str, Path], capsys: Any) -> None:
    found = []
    for options in ([], ["--speculate", "lookup", "--draft-tree"]):
        shared = ["--engine", "htp", "--prompt", "a b a c a", "--max-new-tokens", "20", "--ignore-eos", "--json"]
        assert run(["generate", str(bundles["rows"]), *shared, *options]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[1]["stats"]["speculation"]["drafters"]["lookup"]["proposed"] > 0
    for command in ("chat", "serve"):
        assert run([command, "--help"]) == 0
        assert "--draft-tree" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.htp
def test_a_grammar_takes_the_likeliest_branch(bundles: dict[str, Path]) -> None:
    params = LONG.overlaid(grammar=Grammar.regex("(yes|no), (sure|never), (yes|no)"))
    with edgekv.load(bundles["rows"], "htp") as model:
        plain = [token.id for token in model.generate(PROMPT, params)]
        drafts = Speculation(drafter=Thicket(PROMPT + plain, model.bundle.manifest.model.vocab))
        assert [token.id for token in model.generate(PROMPT, params, speculate=drafts)] == plain


# Trees by themselves


@given(chains=CHAINS, most=st.integers(0, 12))
def test_a_tree_has_the_likeliest_nodes_of_all_continuations(chains: list[list[int]], most: int) -> None:
    tree = DraftTree.of(chains, most)
    beginnings = {tuple(chain[: n + 1]) for chain in chains for n in range(len(chain))}
    assert len(tree) == min(most, len(beginnings))
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len({*paths}) == len(paths) and {*paths} <= beginnings
    assert tree.depth == max(map(len, paths), default=0)
    for path in paths:
        nodes = tree.path(path)
        assert [tree.tokens[node] for node in nodes] == [*path]
        assert tree.path([*path, 9]) == nodes
    assert DraftTree.of(chains, 99).first(most) == tree


def test_a_chain_is_a_tree_that_does_not_branch() -> None:
    chain = DraftTree.chain([5, 6, 7])
    assert chain.is_chain and chain == DraftTree.of([[5, 6, 7]], 9) and chain.trunk() is chain
    tree = DraftTree.of([[5, 6, 7], [8]], 9)
    assert not tree.is_chain and tree.trunk().tokens == (5, 6, 7) and tree.path([8]) == [2 + 1]
    assert tree.continues(-1) and not tree.continues(tree.path([8])[-1])


@pytest.mark.parametrize("parents", [(0,), (-2,), (-1, 1), ()])
def test_parents_that_make_no_tree_are_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="draft tree: got"):
        DraftTree((5, 6)[: max(len(parents), 1)], parents)


def test_a_row_sees_its_own_ancestors_at_their_depths() -> None:
    rows = tree_rows([5, 6, 7, 8, 9], [-1, 0, 1, 0, 3], 10)
    assert [row.token for row in rows] == [5, 6, 7, 8, 9]
    assert [row.position for row in rows] == [10, 11, 12, 11, 12]
    assert [tuple(row.rows) for row in rows] == [(0,), (0, 1), (0, 1, 2), (0, 3), (0, 3, 4)]


def test_lookup_proposes_what_followed_in_several_places() -> None:
    text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2]
    tree = PromptLookup(tree=True).propose(text, 9)
    assert isinstance(tree, DraftTree) and len(tree) == 9
    assert tree.trunk().tokens[:4] == (4, 8, 1, 2), "the latest is the likeliest"
    assert len(tree.path([3, 9])) == 2
    assert not PromptLookup(tree=True).propose([1, 2, 3], 9)


def test_a_corpus_proposes_the_max_frequent_continuations() -> None:
    tokens = np.array([1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 5, 0], np.uint32)
    tree = CorpusDrafter(CorpusIndex(build_index(tokens), len(tokens)), tree=True).propose([1, 2], 6)
    assert isinstance(tree, DraftTree)
    assert tree.tokens[0] == 3 and tree.path([5, 0]) != []


def test_auto_learns_how_deep_trees_reach() -> None:
    """After 1 and 2 comes one of two tokens at random, of which a branch has the other one, then two new ones."""
    chance = random.Random(0)
    text = [token for new in range(10, 210, 2) for token in (new, new + 1, 1, 2, chance.choice((3, 4)))]

    def passes(*, tree: bool) -> int:
        record = DraftRecord()
        for rows, ns in ((1, 1000), (8, 1100)) * 5:
            record.add_pass(rows, ns)
        drafter = AdaptiveDrafter([PromptLookup(tree=tree)], (8,), record, 7)
        at = count = 0
        while at < len(text):
            draft = as_tree(drafter.propose(text[:at], 7))
            right = len(draft.path(text[at : at + 7]))
            record.add_pass(8 if len(draft) else 1, 1100 if len(draft) else 1000)
            at, count = at + right + 1, count + 1
        return count

    assert passes(tree=True) < 0.9 * passes(tree=False)


# Options


def test_an_engine_that_cannot_check_branches_refuses_them(bundles: dict[str, Path], capsys: Any) -> None:
    wanted = "tree: got the engine cpu, whose sums depend on the columns of tokens"
    with edgekv.load(bundles["rows"]) as model, pytest.raises(UsageError, match=wanted):
        model.generate(PROMPT, LONG, speculate=Speculation(tree=True))
    options = ["--prompt", "Hi", "--speculate", "lookup", "--draft-tree", "--cpu-mode", "emulate"]
    assert run(["generate", str(bundles["rows"]), *options]) == 2
    captured = capsys.readouterr()
    assert wanted in captured.err and captured.out == ""


def test_an_engine_that_cannot_check_drafts_refuses_those_that_are_asked_for(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """On ARM the CPU's products of one row round in another way; `auto` drafts nothing there."""
    monkeypatch.setattr("edgekv.runtime.cpu.is_arm", lambda: True)
    with edgekv.load(bundles["rows"]) as model:
        with pytest.raises(UsageError, match="mode: got lookup on the engine cpu, whose results depend on"):
            model.generate(PROMPT, LONG, speculate="lookup")
        assert [*model.generate(PROMPT, LONG, speculate="auto")]
    assert run(["generate", str(bundles["rows"]), "--prompt", "Hi", "--speculate", "lookup"]) == 2
    captured = capsys.readouterr()
    assert "--speculate: got lookup on the engine cpu-fast" in captured.err and captured.out == ""


def test_a_tree_without_a_drafter_that_makes_one_is_refused(bundles: dict[str, Path], capsys: Any) -> None:
    with pytest.raises(UsageError, match="tree: got a tree with the mode off"):
        Speculation("off", tree=True)
    assert run(["generate", str(bundles["rows"]), "--prompt", "Hi", "--speculate", "draft", "--draft-tree"]) == 2
    assert "--draft: got none" in capsys.readouterr().err
