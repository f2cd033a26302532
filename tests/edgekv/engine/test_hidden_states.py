"""Hidden states of a text's newest tokens: which are held, and in how much memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from edgekv.engine.hidden_states import HiddenStates

MOST = 8


def rows(position: int, count: int) -> np.ndarray:
    """`[count, 2]`: each row says its position, and a number of its own."""
    return np.arange(position, position + count)[:, None] * 2 + np.arange(2)


def held(states: HiddenStates) -> list[int]:
    return (states.rows(states.first, states.stop)[:, :1].ravel() // 2).tolist()


@given(st.lists(st.tuples(st.sampled_from(["write", "behind", "rewind"]), st.integers(0, 20), st.integers(1, 12))))
def test_what_is_held_is_what_was_written_last_without_a_gap(calls: list[tuple[str, int, int]]) -> None:
    states, text = HiddenStates(MOST), list[int]()
    for call, position, count in calls:
        if call == "rewind":
            states.rewind(position)
            text = [at for at in text if at < position]
        else:
            position = states.stop if call == "behind" else position
            states.write(position, rows(position, count))
            text = [at for at in text if at < position] if text and text[0] <= position <= text[-1] + 1 else []
            text += range(position, position + count)
        expected = text[text.index(states.first) :] if states.first < states.stop else []
        assert held(states) == expected
        assert len(expected) >= min(len(text), MOST // 2)
        text = expected


def test_rows_beyond_the_limit_drop_the_older_half() -> None:
    states = HiddenStates(MOST)
    states.write(0, rows(0, MOST))
    assert (states.first, states.stop) == (0, MOST)
    states.write(MOST, rows(MOST, 1))
    assert (states.first, states.stop) == (5, 9) and held(states) == [5, 6, 7, 8]
    states.write(9, rows(9, 12))  # more than there is room for: all of them, and nothing else
    assert (states.first, states.stop) == (9, 21)


def test_rows_of_another_type_keep_those_before_them() -> None:
    states = HiddenStates(MOST)
    states.write(0, rows(0, 2).astype(np.uint8))
    states.write(2, rows(2, 2).astype(np.float32))
    assert held(states) == [0, 1, 2, 3] and states.rows(0, 4).dtype == np.float32


def test_nothing_is_allocated_without_rows() -> None:
    states = HiddenStates(MOST)
    assert states.bytes_held == 0
    states.write(3, rows(3, 2))
    assert states.bytes_held > 0
    states.rewind(3)
    assert (states.first, states.stop, states.bytes_held) == (3, 3, 0)


def test_a_text_that_outgrows_the_context_takes_no_more_memory() -> None:
    """As under a sliding window, where only the newest are read."""
    states = HiddenStates(128)
    for position in range(0, 5000, 5):
        states.write(position, rows(position, 5))
        assert held(states) == [*range(states.first, position + 5)] and states.bytes_held <= 128 * 2 * 8
    assert states.stop == 5000 and states.stop - states.first >= 64
