"""What becomes of drafts: how many are asked for and run, what is counted, and what drafters are told."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from edgekv.draft import DraftTree
from edgekv.engine.speculation import DrafterStats, ModelDrafter, SpeculationRun, SpeculationStats
from edgekv.errors import UsageError


class Fixed:
    """Proposes the same draft each time."""

    name = "fixed"
    support = 0
    ns_per_token = 1.0

    def __init__(self, draft: Any) -> None:
        self.draft = draft
        self.asked: list[int] = []
        self.told: list[int] = []

    def propose(self, tokens: Sequence[int], k: int) -> Any:
        self.asked.append(k)
        return self.draft

    def accepted(self, n: int) -> None:
        self.told.append(n)


TREE = DraftTree((10, 11, 12, 13), (-1, 0, 0, 2))  # 10, then 11, or 12 and 13


def test_a_run_begins_at_nothing() -> None:
    stats = SpeculationRun(Fixed([])).stats
    assert stats == SpeculationStats(passes=0, tokens=0, drafters={}, draft_ns=0, accept_ns=0)
    assert stats.tokens_per_pass is None and (stats.proposed, stats.accepted) == (0, 0)


@pytest.mark.parametrize(("limit", "k", "asked"), [(None, 5, 5), (3, 5, 3), (3, 2, 2), (None, 1, 1)])
def test_no_more_drafts_run_than_were_asked_for(limit: int | None, k: int, asked: int) -> None:
    drafter = Fixed([7] * 9)
    run = SpeculationRun(drafter, limit)
    assert run.propose([1], k, 320) == DraftTree.chain([7] * asked) and drafter.asked == [asked]
    assert run.stats.draft_ns > 0


def test_without_room_no_drafter_is_asked() -> None:
    drafter = Fixed([7])
    assert len(SpeculationRun(drafter).propose([1], 0, 320)) == 0 and drafter.asked == []


def test_a_draft_ends_before_a_token_beyond_the_vocabulary() -> None:
    assert SpeculationRun(Fixed([1, 2, 320, 3])).propose([1], 8, 320) == DraftTree.chain([1, 2])


def test_what_is_no_draft_is_refused_by_the_drafters_name() -> None:
    with pytest.raises(UsageError, match="drafter fixed: got text; expected token ids"):
        SpeculationRun(Fixed("text")).propose([1], 8, 320)


def test_drafts_are_counted_and_the_drafter_is_told_once_how_many_were_right() -> None:
    costs: list[tuple[int, int]] = []
    drafter = Fixed([5, 6, 7])
    run = SpeculationRun(drafter, record=SimpleNamespace(add_pass=lambda rows, ns: costs.append((rows, ns))))  # type: ignore[arg-type]
    for right, ns in ((2, 40), (0, 50)):
        drafts = run.propose([1], 3, 320)
        run.ran(4, drafts, ns)
        run.accept(drafts.tokens[:right])
        for _ in range(right + 1):
            run.chose(3)
    assert drafter.told == [2]  # of the last pass, more may follow
    run.finish()
    run.end()
    assert drafter.told == [2, 0] and costs == [(4, 40), (4, 50)]
    stats = run.stats
    assert stats.drafters == {"fixed": DrafterStats(proposals=2, proposed=6, accepted=2, branched=0)}
    assert (stats.passes, stats.tokens, stats.accept_ns) == (2, 4, 12)
    assert (stats.proposed, stats.accepted, stats.tokens_per_pass) == (6, 2, 2.0)


def test_a_pass_without_drafts_counts_for_no_drafter() -> None:
    drafter = Fixed([])
    run = SpeculationRun(drafter)
    run.accept([1])  # before any pass
    run.ran(1, run.propose([1], 3, 320), 40)
    run.accept([1])
    run.end()
    assert drafter.told == [] and run.stats.drafters == {} and run.stats.passes == 1


@pytest.mark.parametrize(("right", "branched"), [((10, 11), 0), ((10, 12, 13), 2), ((10,), 0), ((), 0)])
def test_what_the_likeliest_continuation_would_not_have_had_is_counted(right: tuple[int, ...], branched: int) -> None:
    run = SpeculationRun(Fixed(TREE))
    run.ran(8, run.propose([1], 8, 320), 40)
    for token in right:  # one at a time: each follows the one before it
        run.accept([token])
    assert run.stats.drafters["fixed"] == DrafterStats(1, 4, len(right), branched)


def test_a_model_reads_the_session_of_its_text_until_the_text_ends() -> None:
    seen: list[tuple[object, ...]] = []

    def propose(tokens: Sequence[int], k: int, vocab: int, session: Any) -> list[int]:
        seen.append((tuple(tokens), k, vocab, session))
        return [4, 5]

    model, session = ModelDrafter(propose, 320), SimpleNamespace()
    run = SpeculationRun(model, 2, reader=model)
    assert model.ns_per_token == 1
    assert run.propose([1, 2], 8, 320, session) == DraftTree.chain([4, 5])  # type: ignore[arg-type]
    assert seen == [((1, 2), 2, 320, session)] and model.ns_per_token > 1 and model.session is session
    run.finish()
    assert model.session is None
