"""Which texts share a pass."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given, strategies as st

from edgekv.embed import packed
from edgekv.engine import Request

texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), min_size=1, max_size=30)


def bundle(context: int = 32, sink: tuple[int, ...] = (), whole: tuple[int, ...] = ()) -> SimpleNamespace:
    """Its graphs run whole texts of these lengths, if there are any."""
    graphs = [SimpleNamespace(ar=length, role="verify") for length in whole]
    first, model = SimpleNamespace(tokens=sink) if sink else None, SimpleNamespace(bidirectional=bool(whole))
    return SimpleNamespace(context=context, sink=first, model=model, graphs=graphs)


@given(texts, st.integers(0, 8), st.booleans(), st.lists(st.integers(0, 2), max_size=3).map(tuple))
def test_every_text_gets_its_own_rows(texts, rows, ends, sink):
    """Where the last row alone is wanted, what texts share beyond a sink is in none of theirs."""
    texts = [(*sink, *text) for text in texts]
    requests = [Request(text, ends=ends, scores=not ends) for text in texts]
    found = {}
    for pack in packed(requests, rows, bundle(sink=sink)):
        whole = pack.request.branches or (pack.request.tokens[len(sink) :],)
        assert not pack.request.branches or len(pack.request.branches) > 1
        assert sum(map(len, pack.request.branches)) <= rows and len(pack.request.tokens) + rows <= 32 + rows
        given = np.concatenate([np.array(each, np.float32) for each in (sink, *whole)])[:, None]
        found.update(pack.rows_of(given))
        for number, branch in zip(pack.numbers, pack.request.branches, strict=False):
            assert pack.request.tokens + branch == texts[number]
    assert sorted(found) == [*range(len(texts))]
    for number, own in found.items():
        seen = tuple(own[:, 0])
        assert texts[number][-1] == seen[-1] if ends else texts[number] == seen


@given(texts, st.sampled_from([(12,), (4, 12), (3, 8, 24)]), st.booleans(), st.booleans())
def test_texts_with_attention_to_both_sides_are_whole(texts, lengths, shares, ends):
    requests = [Request(text, ends=ends, scores=not ends) for text in texts]
    packs = packed(requests, shares * lengths[-1], bundle(whole=lengths))
    for pack in packs:
        assert pack.request.tokens == () and pack.request.branches
        assert pack.request.branches == tuple(texts[number] for number in pack.numbers)
        longest = max(map(len, pack.request.branches))
        assert sum(map(len, pack.request.branches)) <= next(length for length in lengths if longest <= length)
        assert shares or len(pack.numbers) == 1
    assert sorted(number for pack in packs for number in pack.numbers) == [*range(len(texts))]


def test_short_texts_run_in_short_graphs_and_beside_long_ones():
    lengths = [20, 3, 3, 3, 3, 3]
    packs = packed([Request((1,) * length, scores=True) for length in lengths], 24, bundle(whole=(8, 24)))
    assert sorted(sorted(lengths[number] for number in pack.numbers) for pack in packs) == [[3, 3], [3, 3], [3, 20]]


def test_as_few_passes_as_lengths_let_there_be():
    lengths = [5, 3, 4, 4, 6, 2, 8, 9]
    packs = packed([Request((1,) * length, scores=True) for length in lengths], 8, bundle())
    assert sorted(sorted(lengths[number] for number in pack.numbers) for pack in packs) == [
        [2, 6],
        [3, 5],
        [4, 4],
        [8],
        [9],
    ]


def test_a_beginning_is_shared_if_that_saves_a_pass():
    texts = [(1, 1, 1, 1, 1, number) for number in range(16)]
    (long, *_), few = packed([Request(text, ends=True) for text in texts], 8, bundle()), texts[:2]
    assert long.request.tokens == (1,) * 5 and len(long.request.branches) == 8
    assert packed([Request(text[3:], ends=True) for text in few], 8, bundle())[0].request.tokens == ()


def test_a_beginning_that_leaves_no_room_for_a_pass_is_not_shared():
    texts = [(*(1,) * 28, number) for number in range(4)]
    assert all(not pack.request.branches for pack in packed([Request(each, ends=True) for each in texts], 8, bundle()))
