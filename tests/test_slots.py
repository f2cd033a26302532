"""Which cache a request continues."""

from __future__ import annotations

from edgekv.serve.slots import Slot, Slots
from edgekv.session.session import common_tokens


class Pool:
    """Tokens by sequence, in place of a model's sessions."""

    def __init__(self, room: int = 99) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.room = room

    def slots(self, most: int) -> Slots:
        def drop(sequence: int) -> None:
            self.tokens.pop(sequence, None)

        return Slots(most, lambda sequence: self.tokens.get(sequence, []), drop, lambda: len(self.tokens) < self.room)

    def run(self, slots: Slots, tokens: list[int], salt: str | None = None) -> Slot:
        """A request from its start to its end."""
        slot = slots.take(tokens, salt)
        assert slot is not None
        self.tokens[slot.sequence] = tokens
        slots.give_back(slot)
        return slot


def test_a_conversation_goes_on_in_its_own_cache():
    pool = Pool()
    slots = pool.slots(4)
    first, second = pool.run(slots, [1, 2, 3]), pool.run(slots, [4, 5, 6])
    assert first.sequence != second.sequence
    assert pool.run(slots, [1, 2, 3, 7, 8]) is first and pool.run(slots, [4, 5, 6, 9]) is second
    assert pool.run(slots, [1, 2, 3, 7, 9]) is first  # another answer to the same question
    assert len(slots) == 2


def test_a_cache_is_not_given_up_for_a_shorter_prefix():
    """Its tokens are worth more than the few that are shared; those come from the prefix cache."""
    pool = Pool()
    slots = pool.slots(4)
    long = pool.run(slots, [1, 2, 3, 4, 5, 6, 7])
    assert pool.run(slots, [1, 2, 8]) is not long
    assert pool.tokens[long.sequence] == [1, 2, 3, 4, 5, 6, 7]


def test_busy_caches_are_left_alone():
    pool = Pool()
    slots = pool.slots(2)
    busy = slots.take([1, 2], None)
    assert busy is not None and slots.busy == 1
    pool.tokens[busy.sequence] = [1, 2]
    other = slots.take([1, 2, 3], None)
    assert other is not None and other is not busy and slots.take([1, 2, 4], None) is None
    slots.give_back(busy)
    assert slots.take([1, 2, 4], None) is busy


def test_the_least_recently_used_one_makes_room():
    pool = Pool()
    slots = pool.slots(2)
    first = pool.run(slots, [1, 1])
    pool.run(slots, [2, 2])
    pool.run(slots, [1, 1, 1])
    third = pool.run(slots, [3, 3])
    assert sorted(pool.tokens) == [first.sequence, third.sequence]


def test_memory_is_a_limit_too():
    pool = Pool(room=1)
    slots = pool.slots(8)
    first = slots.take([1], None)
    assert first is not None
    pool.tokens[first.sequence] = [1]
    assert slots.take([2], None) is None  # nothing idle could make room
    slots.give_back(first)
    assert slots.take([2], None) is not None and first.sequence not in pool.tokens
    assert Pool(room=0).slots(1).take([1], None) is not None  # the model refuses it by name


def test_no_key_continues_the_cache_of_another():
    pool = Pool()
    slots = pool.slots(4)
    mine = pool.run(slots, [1, 2, 3], "a")
    assert pool.run(slots, [1, 2, 3], "b") is not mine and pool.run(slots, [1, 2, 3], None) is not mine
    assert pool.run(slots, [1, 2, 3], "a") is mine


def test_an_evicted_sequence_is_forgotten():
    pool = Pool()
    slots = pool.slots(4)
    slot = slots.take([1, 2], None)
    assert slot is not None
    slots.give_back(slot)
    assert len(slots) == 0
    pool.run(slots, [1, 2])
    slots.clear()
    assert len(slots) == 0 and not pool.tokens


def test_common_tokens():
    assert common_tokens([1, 2, 3], [1, 2, 4]) == 2 and common_tokens([], [1]) == 0
    assert common_tokens([1, 2], [1, 2, 3]) == 2 and common_tokens([2], [1]) == 0
