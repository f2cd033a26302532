"""How much is drafted follows what drafts were worth and what passes cost. Times here are numbers, not measured."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from edgekv.draft import Acceptance, AdaptiveDrafter, DraftRecord, PromptLookup

ROWS = (8, 16)
MS = 1_000_000
RANDOM = np.random.default_rng(0).integers(0, 5000, 2000).tolist()
LOOP = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 200


def record_of(**ms: float) -> DraftRecord:
    """Costs measured already; `r8=20` is 20 ms for a pass of 8 rows."""
    record = DraftRecord()
    for name, value in ms.items():
        for _ in range(5):
            record.add_pass(int(name[1:]), int(value * MS))
    return record


class Run:
    """A text whose tokens are known, generated with speculation; a pass takes what `ms` says."""

    def __init__(
        self, drafter: AdaptiveDrafter, record: DraftRecord, text: Sequence[int], prompt: int, ms: dict[int, float]
    ) -> None:
        self.passes = 0
        self.with_drafts = 0
        self.ms = 0.0
        at = prompt
        while at < len(text):
            drafts = drafter.propose(text[:at], ROWS[-1] - 1)
            rows = next((each for each in ROWS if each > len(drafts)), 0) if drafts else 1
            right = next((n for n, token in enumerate(drafts) if text[at + n : at + n + 1] != [token]), len(drafts))
            if drafts:
                drafter.accepted(right)
            record.add_pass(rows, int(ms[rows] * MS))
            at += right + 1
            self.passes += 1
            self.with_drafts += bool(drafts)
            self.ms += ms[rows]
        self.tokens = at - prompt


def adaptive(record: DraftRecord, most: int = 15) -> AdaptiveDrafter:
    return AdaptiveDrafter([PromptLookup()], ROWS, record, most)


def run_of(record: DraftRecord, text: Sequence[int], ms: dict[int, float]) -> Run:
    return Run(adaptive(record), record, text, 20, ms)


def test_the_lower_quartile_is_kept_of_each_size_and_the_first_pass_left_out():
    record = DraftRecord()
    assert record.pass_ns(8) == pytest.approx(record.pass_ns(1) * (1 + 7 / 64))
    for ns in (900, 10, 12, 11, 9, 13):
        record.add_pass(1, ns)
    assert record.pass_ns(1) == 10
    assert record.pass_ns(8) == pytest.approx(10 * (1 + 7 / 64))
    for ns in (9000, 500, 20, 300, 21, 400):
        record.add_pass(8, ns)
    assert record.pass_ns(8) == 21 and record.pass_ns(16) == pytest.approx(10 * (1 + 15 / 64))


def test_a_disturbed_pass_rules_nothing_out():
    record = record_of(r1=10)
    for ns in (9000, 900, 13):
        record.add_pass(8, ns * MS)
    assert record.pass_ns(8) == 13 * MS


def test_fewer_rows_never_cost_more():
    record = record_of(r1=10, r8=90, r16=40)
    assert record.pass_ns(8) == (10 + 30 * 7 / 15) * MS  # disturbed: between its neighbours
    for _ in range(40):
        record.add_pass(8, 15 * MS)
    assert record.pass_ns(8) == 15 * MS


def test_a_pass_of_unknown_cost_lies_between_its_neighbours():
    record = record_of(r1=10, r16=40)
    assert record.pass_ns(8) == (10 + 30 * 7 / 15) * MS


def test_an_old_cost_is_forgotten_and_tried_again_ever_more_rarely():
    record, tried = record_of(r1=10, r8=90), []
    for at in range(4000):
        expensive = record.pass_ns(8) > 50 * MS
        record.add_pass(1 if expensive else 8, 10 * MS if expensive else 90 * MS)
        if not expensive:
            tried.append(at)
    assert all(later - earlier > 2 * 250 for earlier, later in pairwise(tried))
    assert len(tried) == 4  # after 256, 512, 1,024 and 2,048 passes


def test_acceptance_follows_what_was_right_in_each_class_of_drafts():
    acceptance = Acceptance()
    before = acceptance.expected(3, 7)
    for _ in range(50):
        acceptance.add(3, 7)
        acceptance.add(1, 0)
    assert acceptance.expected(2, 7) > 6.5 > before
    assert acceptance.expected(1, 7) < 0.1
    assert acceptance.expected(3, 15) == pytest.approx(acceptance.expected(3, 7), abs=0.3)
    for _ in range(100):
        acceptance.add(3, 0)
    assert acceptance.expected(3, 7) < 0.1


def test_a_repetitive_text_takes_long_drafts():
    ms = {1: 10.0, 8: 14.0, 16: 18.0}
    run = run_of(DraftRecord(), LOOP, ms)
    assert run.tokens / run.passes > 14
    assert run.ms < 0.2 * run.tokens * ms[1]


def test_a_random_text_takes_none():
    run = run_of(DraftRecord(), RANDOM, {1: 10.0, 8: 14.0, 16: 18.0})
    assert run.ms < 1.01 * run.tokens * 10.0
    assert run.with_drafts < 0.02 * run.passes


def test_nothing_is_drafted_where_a_pass_costs_more_than_it_brings():
    ms = {1: 10.0, 8: 90.0, 16: 200.0}
    run = run_of(DraftRecord(), LOOP, ms)
    assert run.ms < 1.03 * run.tokens * ms[1]
    assert 0 < run.with_drafts < 20  # tried again from time to time


def test_shorter_drafts_where_more_rows_cost_more_than_they_bring():
    ms = {1: 10.0, 8: 12.0, 16: 60.0}
    run = run_of(record_of(r1=10, r8=12, r16=60), LOOP, ms)
    assert 7.5 < run.tokens / run.passes < 8.5  # the larger graph is tried again from time to time


def test_speculation_comes_back_when_the_text_begins_to_repeat_itself():
    text = RANDOM[:1000] + LOOP[:400]
    run = run_of(DraftRecord(), text, {1: 10.0, 8: 14.0, 16: 18.0})
    assert run.passes < 980 + 90


def test_drafts_are_at_max_as_long_as_asked_for():
    drafter = adaptive(record_of(r1=10, r8=11, r16=12), most=4)
    assert len(drafter.propose(LOOP[:100], 15)) == 4
    assert len(adaptive(record_of(r1=10, r8=11, r16=12)).propose(LOOP[:100], 2)) == 2


class Slow:
    """A drafter that is always right and takes a time; it counts how often it is asked."""

    name, support = "slow", 0

    def __init__(self, text: Sequence[int], ns_per_token: float) -> None:
        self.ns_per_token = ns_per_token
        self.asked = 0
        self._text = text

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        self.asked += 1
        return self._text[len(tokens) : len(tokens) + k]

    def accepted(self, n: int) -> None:
        pass


@pytest.mark.parametrize(("ms_per_token", "pays"), [(1.0, True), (30.0, False)])
def test_a_drafter_that_takes_time_is_asked_where_it_pays(ms_per_token: float, pays: bool):
    slow = Slow(RANDOM, ms_per_token * MS)
    record = record_of(r1=10, r8=12, r16=14)
    drafter = AdaptiveDrafter([PromptLookup(), slow], ROWS, record, 15)
    run = Run(drafter, record, RANDOM, 20, {1: 10.0, 8: 12.0, 16: 14.0})
    assert (run.tokens / run.passes > 5) == pays
    assert slow.asked < 12 or pays
    if pays:
        assert drafter.name == "slow"
