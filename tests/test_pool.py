"""Which session of the pool a text continues."""

from __future__ import annotations

from edgekv.kv import Geometry, KVCache
from edgekv.session import Always, ByteBudget, Session, SessionPool
from edgekv.session.session import common_tokens

GEOMETRY = Geometry(layers=1, kv_heads=1, head_dim=4, context=16)
MOST = 4


class NoGraphs:
    """In place of a bundle's graphs: nothing runs here."""

    cache = None


def session() -> Session:
    return Session(KVCache(GEOMETRY, ar=(1, 4), strategy="slot"), NoGraphs())


BYTES = session().cache.stats.bytes_held


def pool_of(room: int = 99) -> SessionPool:
    return SessionPool(session, Always(ByteBudget(max(1, room * BYTES))))


def taken(pool: SessionPool, tokens: list[int], owner: str | None = None, most: int = MOST) -> int:
    """The id for a text, whose tokens then are in its session."""
    found = pool.take(tokens, owner, most)
    assert found is not None
    pool.get_or_create(found).tokens = list(tokens)
    return found


def run(pool: SessionPool, tokens: list[int], owner: str | None = None, most: int = MOST) -> int:
    """A request from its start to its end."""
    found = taken(pool, tokens, owner, most)
    pool.give_back(found)
    return found


def test_a_conversation_goes_on_in_its_own_cache():
    pool = pool_of()
    first, second = run(pool, [1, 2, 3]), run(pool, [4, 5, 6])
    assert first != second
    assert run(pool, [1, 2, 3, 7, 8]) == first and run(pool, [4, 5, 6, 9]) == second
    assert run(pool, [1, 2, 3, 7, 9]) == first  # another answer to the same question
    assert len(pool) == 2


def test_a_cache_is_not_given_up_for_a_shorter_prefix():
    """Its tokens are worth more than the few that are shared; those come from the prefix cache."""
    pool = pool_of()
    long = run(pool, [1, 2, 3, 4, 5, 6, 7])
    assert run(pool, [1, 2, 8]) != long
    held = pool.get(long)
    assert held is not None and held.tokens == [1, 2, 3, 4, 5, 6, 7]


def test_busy_caches_are_left_alone():
    pool = pool_of()
    busy = taken(pool, [1, 2], most=2)
    assert pool.taken == 1
    other = pool.take([1, 2, 3], None, 2)
    assert other is not None and other != busy and pool.take([1, 2, 4], None, 2) is None
    pool.give_back(busy)
    assert pool.take([1, 2, 4], None, 2) == busy


def test_the_least_recently_used_one_makes_room():
    pool = pool_of()
    first = run(pool, [1, 1], most=2)
    run(pool, [2, 2], most=2)
    run(pool, [1, 1, 1], most=2)
    third = run(pool, [3, 3], most=2)
    assert sorted(pool.ids) == [first, third]


def test_memory_is_a_limit_too():
    pool = pool_of(room=1)
    first = taken(pool, [1], most=8)
    assert pool.take([2], None, 8) is None  # nothing idle could make room
    pool.give_back(first)
    assert pool.take([2], None, 8) is not None and first not in pool
    assert pool_of(room=0).take([1], None, 1) is not None  # `get_or_create` refuses it by name


def test_nobody_continues_the_cache_of_another():
    pool = pool_of()
    mine = run(pool, [1, 2, 3], "a")
    assert run(pool, [1, 2, 3], "b") != mine and run(pool, [1, 2, 3], None) != mine
    assert run(pool, [1, 2, 3], "a") == mine


def test_an_id_is_never_used_again():
    pool = pool_of()
    ids = [run(pool, [number], most=1) for number in range(1, 6)]
    assert len({*ids}) == len(ids) and len(pool) == 1


def test_a_sequence_that_has_no_tokens_is_forgotten():
    pool = pool_of()
    found = pool.take([1, 2], None, MOST)
    assert found is not None
    pool.give_back(found)
    assert pool.take([1, 2], None, 1) is not None, "it takes no room"
    pool = pool_of()
    evicted = taken(pool, [1, 2])
    pool.drop(evicted)
    pool.give_back(evicted)
    run(pool, [1, 2])
    pool.forget_idle()
    assert len(pool) == 0 and pool.taken == 0


def test_common_tokens():
    assert common_tokens([1, 2, 3], [1, 2, 4]) == 2 and common_tokens([], [1]) == 0
    assert common_tokens([1, 2], [1, 2, 3]) == 2 and common_tokens([2], [1]) == 0
