"""An exception at any point of a change: what is held afterwards is right, or known to be wrong and never used."""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import edgekv
from edgekv.errors import EdgeKVError
from edgekv.kv import KeyDiff, KVCache
from edgekv.kv.columns import ColumnArena
from edgekv.kv.rows import RowArena
from edgekv.prefix import StoreConfig
from edgekv.prefix.table import INDEX, Row, Table
from tests.support.kv_graph import feed, geometry_of, held
from tests.support.thorough import variants

STRATEGIES = [
    ("pointer-shift", 2.0, "rows"),
    ("pointer-shift", 1.25, "rows"),
    ("slot", None, "rows"),
    ("mirror", None, "rows"),
    ("shift-concat", None, "rows"),
    ("pointer-shift", 1.25, "columns"),
    ("slot", None, "columns"),
    ("mirror", None, "columns"),
    ("shift-concat", None, "columns"),
]
MOVING = [(RowArena, "execute"), (RowArena, "compact"), (ColumnArena, "execute"), (ColumnArena, "relocate")]


class InterruptionError(Exception):
    """Stands for Ctrl-C."""


@contextmanager
def interrupted(number: int, *, late: bool) -> Iterator[list[str]]:
    """Interrupt the move of this number, before it or after it; yields what was moved."""
    moves: list[str] = []

    def wrapped(original: Any, name: str) -> Any:
        def move(*arguments: Any, **options: Any) -> Any:
            moves.append(name)
            if len(moves) == number and not late:
                raise InterruptionError
            found = original(*arguments, **options)
            if len(moves) == number:
                raise InterruptionError
            return found

        return move

    with pytest.MonkeyPatch.context() as patch:
        for kind, name in MOVING:
            patch.setattr(kind, name, wrapped(getattr(kind, name), name))
        yield moves


@pytest.mark.parametrize("policy", ["fail", "sliding-window", KeyDiff(4, 1)])
@pytest.mark.parametrize(("strategy", "reserve", "layout"), STRATEGIES)
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_move_is_never_taken_for_a_whole_one(
    strategy: str, reserve: float | None, layout: str, policy: str | KeyDiff, late: bool
) -> None:
    row_bytes = 2048 if strategy == "mirror" else 8
    geometry = geometry_of(12, key_layout=layout, row_bytes=row_bytes, layers=2)
    number, seen_moves = 0, 1
    while number < seen_moves:
        number += 1
        cache = KVCache(geometry, ar=(1, 3), strategy=strategy, reserve=reserve, policy=policy)
        text, moves = _schedule(cache, number, late)
        seen_moves = max(seen_moves, moves + 1)
        if cache.dirty:
            for use in (lambda c=cache: c.window(1), lambda c=cache: c.rewind(0), lambda c=cache: c.state):
                with pytest.raises(ValueError, match="got a dirty cache"):
                    use()
            cache.reset()
            text = []
        found = held(cache)
        # KeyDiff keeps any tokens, in their order.
        expected = text[len(text) - len(found) :] if isinstance(policy, str) else [t for t in text if t in found]
        assert not cache.dirty and found == expected
        if cache.room(1):
            feed(cache, 1, [1000])
            assert held(cache)[-1] == 1000


def _schedule(cache: KVCache, number: int, late: bool) -> tuple[list[int], int]:
    """Steps of all kinds until the move of this number is interrupted: the text before it, and the moves made."""
    text: list[int] = []
    steps = [3, 1, 3, 1, 1, -2, 3, 1, 1, 3, 1, -1, 1, 1, 1, 3, 1]
    with interrupted(number, late=late) as moves:
        try:
            for step in steps:
                if step < 0:
                    n = min(-step, cache._positions.rewindable)
                    cache.rewind(n)
                    text = text[: len(text) - n]
                elif cache.room(step):
                    new = list(range(len(text) and text[-1] + 1, (len(text) and text[-1] + 1) + step))
                    feed(cache, step, new)
                    text += new
        except InterruptionError:
            pass
    return text, len(moves)


PROMPT = [5, 9, 13, 7, 21, 3, 8, 11, 30, 4, 17, 6]
OTHER = [5, 9, 13, 7, 22, 40]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", variants(["slot", "pointer-shift"], ["pointer-shift"]))
def test_ctrl_c_at_any_line_of_a_step_leaves_a_model_that_gives_the_same_tokens(small: Path, strategy: str) -> None:
    """150 of the lines that a generation runs; with what the prefix store has of it."""

    def load() -> edgekv.Model:
        store = StoreConfig(max_bytes=1 << 22, tokens_per_block=4)
        return edgekv.load(small, threads=1, kv_update=strategy, prefix_cache=store)

    def ids(model: edgekv.Model, prompt: list[int], **options: Any) -> list[int]:
        return [token.id for token in model.generate(prompt, 6, **options)]

    fresh = load()
    wanted = ids(fresh, PROMPT), ids(fresh, OTHER)
    model = load()
    ids(model, PROMPT, sequence=1)  # graphs are loaded
    lines = _interrupt(partial(ids, model, [*OTHER, 9], sequence=1), None)
    for number in range(1, lines, lines // 150):
        prompt = [*PROMPT, 9, 10 + number % 50]
        _interrupt(partial(ids, model, prompt, sequence=1), number)
        found = ids(model, PROMPT, sequence=1), ids(model, OTHER, sequence=1)
        assert found == wanted, f"after an interruption at line {number} of {lines}"
    assert (ids(model, PROMPT), ids(model, OTHER)) == wanted  # another sequence, from the prefix store
    model.close()


PACKAGE = Path(edgekv.__file__).parent
PATIENCE_S = 60
WAY = [str(PACKAGE / "engine" / name) for name in ("engine.py", "scheduler.py", "runner.py", "pool.py", "sequence.py")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # within a finalizer
@pytest.mark.parametrize("end", ["whole", "closed", "dropped"])
def test_ctrl_c_at_any_line_of_a_calls_way_keeps_no_other_thread_waiting(small: Path, end: str) -> None:
    """Through what knows who has a cache: the engine, its scheduler, its runner and the pool."""
    model = edgekv.load(small, threads=1)
    wanted = [token.id for token in model.generate(PROMPT, 2, sequence=1)]

    def call() -> None:
        generation = model.generate(PROMPT, 2, sequence=1)
        if end == "whole":
            assert len([*generation]) == 2
        next(generation, None)
        if end == "closed":
            generation.close()

    def elsewhere() -> None:
        found.append([token.id for token in model.generate(PROMPT, 2, sequence=1)])

    lines = _interrupt(call, None, *WAY)
    assert lines > 200
    for number in range(1, lines + 1):
        found: list[list[int]] = []
        _interrupt(call, number, *WAY)
        thread = threading.Thread(target=elsewhere, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert found == [wanted], f"after an interruption at line {number} of {lines}"
        assert not (model.engine.running or model.engine.waiting) and model.engine.holder(1) is None


def test_ctrl_c_at_any_line_of_deferred_work_keeps_no_lock(small: Path) -> None:
    engine = edgekv.load(small, threads=1).engine

    def step() -> None:
        engine.defer(lambda: done.append("deferred"))

    done: list[str] = []
    lines = _interrupt(partial(engine.locked, step), None, *WAY)
    for number in range(1, lines + 1):
        done.clear()
        _interrupt(partial(engine.locked, step), number, *WAY)
        assert not engine.lock.locked()
        engine.defer(lambda: done.append("later"))
        assert done[-1] == "later"
        assert "deferred" in done or number < 5  # before it was known


def test_ctrl_c_at_any_line_of_a_change_of_the_prefix_table_keeps_no_other_process_waiting(tmp_path: Path) -> None:
    table = Table(tmp_path)
    row = Row(b"k" * 16, 0, b"p" * 16, b"t", 0, True, 1, 1, 1, "store")
    lines = _interrupt(partial(table.put, row), None, str(PACKAGE / "prefix" / "table.py"))
    for number in range(1, lines + 1):
        _interrupt(partial(table.put, row), number, str(PACKAGE / "prefix" / "table.py"))
        with closing(sqlite3.connect(tmp_path / INDEX, timeout=0)) as other:
            other.execute("BEGIN IMMEDIATE")  # refused while a transaction is open


def _interrupt(call: Any, number: int | None, *within: str) -> int:
    """Run a call until the line of this number in files or folders, by default the model's; return the lines run."""
    lines = 0
    files = within or tuple(str(PACKAGE / name) for name in ("kv", "engine", "text", "runtime", "prefix"))

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(files):
            return None
        # A `with` is traced once more behind its block, where Python itself lets nothing interrupt it.
        if event == "line" and not getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            lines += 1
            if lines == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert number is not None
    except EdgeKVError:
        raise
    finally:
        sys.settrace(None)
    return lines
