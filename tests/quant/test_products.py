"""Products whose bits do not depend on the number of BLAS threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from quant import products
from quant.products import in_threads, one_thread, product


def blas_threads() -> set[int]:
    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}


def test_blas_has_one_thread_until_the_last_that_wants_it_is_done() -> None:
    with threadpool_limits(2, "blas"):
        before = blas_threads()
        for _ in range(2):
            with one_thread():
                with one_thread():
                    assert blas_threads() == {1}
                assert blas_threads() == {1}
            assert blas_threads() == before == {2}


@pytest.fixture(params=[1, 2, 5])
def blas(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[products._Blas]:
    """One with as many threads, whatever this machine has."""
    made = products._Blas()
    vars(made)["threads"] = request.param
    monkeypatch.setattr(products, "_BLAS", made)
    yield made
    made.workers.shutdown()


def test_results_come_in_order_and_few_are_begun_before_they_are_taken(blas: products._Blas) -> None:
    begun = list[int]()

    def square(number: int) -> int:
        begun.append(number)
        time.sleep(0.002 * (number % 3))
        return number**2

    for taken, result in enumerate(in_threads(square, range(20), at_once=3)):
        assert result == taken**2
        assert len(begun) <= taken + 3
    assert sorted(begun) == [*range(20)]


def test_the_first_error_is_raised_and_nothing_is_begun_behind_it(blas: products._Blas) -> None:
    begun = list[int]()

    def refuse(number: int) -> int:
        begun.append(number)
        if number >= 3:
            raise ValueError(number)
        return number

    found = list[int]()
    with pytest.raises(ValueError, match=r"^3$"):
        found.extend(in_threads(refuse, range(50), at_once=2))
    assert found == [0, 1, 2]
    assert max(begun) <= 4


def test_products_in_threads_are_those_of_one(blas: products._Blas) -> None:
    left, right = np.random.default_rng(0).standard_normal((2, 300, 300)).astype(np.float32)
    expected = product(left, right)

    def computed(_: int) -> tuple[bool, np.ndarray]:
        return threading.current_thread() is threading.main_thread(), product(left, right)

    found = list(in_threads(computed, range(4)))
    assert all(np.array_equal(expected, result) for _, result in found)
    assert all(in_main == (blas.threads == 1) for in_main, _ in found)
