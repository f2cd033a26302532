"""How fast a core of this machine quantizes: what the time of an export is computed from, measured in two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.graphs.processor import processors
from quant import WEIGHT_TYPES, LayerInputs, WeightDtype, quantize
from quant.products import one_thread

_MEASURED_S = 0.5  # of each kind of work
_WINDOW, _WIDTH = 512, 1024  # of the products; rows of a window, inputs and outputs of a matrix
_ROUNDED = 256, 1024  # inputs and outputs of the matrix that is rounded: as many outputs as are rounded at a time
_TOKENS = 1024  # of its inputs
_DRIFT = 0.1  # of the quantized model's inputs: as 4 bits leave them

ROUNDING_PRODUCTS = {"gptq": 3, "descent": 7}
"""Multiply-adds for each output and pair of inputs, by method, beside the factor of the inputs' squares.

They count as many sweeps of descent as matrices of real models take, four; random ones take fewer.
"""


class HostSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What one core of a machine does in a second of its time, whatever else runs there.

    Attributes:
        cores: that this process may use.
        products_per_s: float32 multiply-adds of a window's rows with a matrix.
        scores_per_s: attention scores whose softmax is computed.
        elements_per_s: elements of a matrix that are rounded, beside the products of it.
        rounding_products: multiply-adds of rounding, for each output and pair of inputs of a matrix.
        is_measured: whether it is of this machine.
    """

    cores: int
    products_per_s: float
    scores_per_s: float
    elements_per_s: float
    rounding_products: int
    is_measured: bool = True


_TYPICAL = HostSpeed(
    cores=2,
    products_per_s=100e9,
    scores_per_s=9.5e8,
    elements_per_s=8e6,
    rounding_products=ROUNDING_PRODUCTS["descent"],
    is_measured=False,
)
"""Of an x86 server with AVX-512, and 4 bits."""


@cache
def measure_host(dtype: WeightDtype) -> HostSpeed:
    """Measure this machine with the operations of an export, once in a process.

    Where nothing can be exported, since the extra `export` is not installed, a typical machine is assumed.

    Args:
        dtype: of most matrices. The default effort rounds int8 by GPTQ, and 4 bits by coordinate descent behind it.
    """
    if find_spec("threadpoolctl") is None:
        return _TYPICAL
    values = np.random.default_rng(0)
    rows = values.standard_normal((_WINDOW, _WIDTH), np.float32)
    matrix = values.standard_normal((_WIDTH, _WIDTH), np.float32)
    scores = values.standard_normal((_WINDOW, _WINDOW), np.float32)
    exact = values.standard_normal((_TOKENS, _ROUNDED[0]), np.float32)
    inputs = LayerInputs(exact, exact + _DRIFT * values.standard_normal(exact.shape, np.float32))
    weight = values.standard_normal(_ROUNDED, np.float32)
    method: Literal["gptq", "descent"] = "descent" if WEIGHT_TYPES[dtype].is_packed else "gptq"
    with one_thread():
        products_per_s = rows.size * _WIDTH / _seconds(lambda: rows @ matrix)
        of_products_s = ROUNDING_PRODUCTS[method] * weight.size * len(weight) / products_per_s
        rounding_s = _seconds(lambda: quantize(weight, dtype, method, inputs))
        return HostSpeed(
            cores=processors(),
            products_per_s=products_per_s,
            scores_per_s=scores.size / _seconds(lambda: _softmax(scores)),
            elements_per_s=weight.size / max(rounding_s - of_products_s, rounding_s / 4),
            rounding_products=ROUNDING_PRODUCTS[method],
        )


def _softmax(scores: NDArray[np.float32]) -> object:
    raised = np.exp(scores - scores.max(1, keepdims=True))
    return np.divide(raised, raised.sum(1, keepdims=True))


def _seconds(work: Callable[[], object]) -> float:
    """Processor time of the fastest of several runs; other processes cannot lengthen it by much."""
    work()
    fastest, until = float("inf"), time.monotonic() + _MEASURED_S
    while time.monotonic() < until:
        before = time.process_time()
        work()
        fastest = min(fastest, time.process_time() - before)
    return max(fastest, 1e-9)
