"""Values of calibration windows, in memory or in a file."""

import errno
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from exporters.quantize.windows import Difference, Room, Windows


def drawn(windows: int, decoders: int, tokens: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((windows, decoders, tokens, width)).astype(np.float32)


@settings(max_examples=50, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(2, 9), st.integers(1, 5)), st.integers(0, 1), st.data()
)
def test_windows_and_rows_are_those_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, int, int, int], first: int, data: st.DataObject
) -> None:
    values = drawn(*shape)
    room = Room(data.draw(st.sampled_from([0, values.nbytes])))
    found = Windows.of(iter(values), shape[0], tmp_path_factory.getbasetemp(), room)
    assert (found.shape, len(found)) == (shape, shape[0])
    np.testing.assert_array_equal(np.stack([*found]), values)
    decoder = data.draw(st.integers(0, shape[1] - 1))
    rows, expected = found.decoder(decoder, first), values[:, decoder, first:].reshape(-1, shape[3])
    start = data.draw(st.integers(0, len(expected) - 1))
    stop = data.draw(st.integers(start + 1, len(expected) + 3))
    assert rows.shape == expected.shape
    np.testing.assert_array_equal(rows[start:stop], expected[start:stop])
    difference = Difference(rows, found.decoder(0, first), np.float32(0.5))
    other = values[:, 0, first:].reshape(-1, shape[3])
    np.testing.assert_array_equal(difference[start:stop], (expected - other)[start:stop] * np.float32(0.5))


def test_no_file_is_left_and_none_has_a_name(tmp_path: Path) -> None:
    values = drawn(2, 1, 4, 3)
    found = Windows.of(iter(values), 2, tmp_path)
    assert [*tmp_path.iterdir()] == []
    np.testing.assert_array_equal(found[1], values[1])


def test_memory_is_room_again_once_nobody_has_the_values() -> None:
    values = drawn(2, 1, 4, 3)
    room = Room(values.nbytes)
    found = Windows.of(iter(values), 2, None, room)
    window = found[1]
    assert room.array(values.shape) is None
    with pytest.raises(ValueError, match="read-only"):
        window[:] = 0
    del found
    assert room.array((1, 1, 1, 1)) is None, "a window is part of it"
    del window
    assert room.array(values.shape) is not None


def test_memory_is_taken_until_its_owner_is_gone() -> None:
    room, owner = Room(100), Windows(np.zeros((1, 1, 1, 1), np.float32), (1, 1, 1, 1))
    assert room.take(40, 3, owner) == 2
    assert room.take(40, 3, owner) == 0
    del owner
    assert room.take(40, 1, room) == 1


def test_memory_of_values_that_are_gone_is_kept_for_the_next_of_their_size() -> None:
    shape, owner = (2, 1, 4, 3), Windows(np.zeros((1, 1, 1, 1), np.float32), (1, 1, 1, 1))
    room = Room(2 * drawn(*shape).nbytes + 40)
    assert room.take(40, 1, owner) == 1
    values = room.array(shape)
    assert values is not None
    address = values.ctypes.data
    del values
    again, other = room.array(shape), room.array(shape)
    assert again is not None
    assert again.ctypes.data == address
    assert other is not None, "nothing kept takes the room of values that are in use"
    assert other.ctypes.data != address
    del again, other
    assert room.array((5, 1, 4, 3)) is None
    assert room.array((4, 1, 4, 3)) is not None, "what is kept is freed for values of another size"


def test_no_memory_is_kept_once_nobody_has_taken_any() -> None:
    shape, owner = (2, 1, 1000, 100), Windows(np.zeros((1, 1, 1, 1), np.float32), (1, 1, 1, 1))
    room = Room(2 * drawn(*shape).nbytes)
    tracemalloc.start()
    room.take(40, 1, owner)
    values = room.array(shape)
    assert values is not None
    held_bytes, _ = tracemalloc.get_traced_memory()
    del values
    kept_bytes, _ = tracemalloc.get_traced_memory()
    del owner
    left_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes > held_bytes / 2
    assert left_bytes < held_bytes / 2


def test_a_full_disk_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Windows, window: int, values: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Windows, "_put", refused)
    with pytest.raises(OSError, match="No space"):
        Windows.of(iter(drawn(2, 1, 4, 3)), 2, None)


def test_a_file_that_was_cut_is_no_endless_loop(tmp_path: Path) -> None:
    place = tmp_path / "values"
    place.write_bytes(b"\0" * 10)
    with place.open("rb") as file, pytest.raises(EOFError, match="ends"):
        Windows(file, (2, 1, 4, 3))[0]
