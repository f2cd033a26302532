"""Comparing the outputs of a hosted device with those of the CPU engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Manifest
from edgekv.errors import ServiceError
from edgekv.spec import LOGITS
from exporters.targets.aihub.sample import Tensors
from quant import Encoding


class OutputError(msgspec.Struct, frozen=True, kw_only=True):
    """One output of one step.

    Attributes:
        name: as in the graph.
        sqnr_db: power of the CPU engine's values over that of the difference, 10 log10(sum x^2 / sum (x - y)^2);
            none if the values are equal.
        differing: share of the values that are not equal.
        most_steps: greatest difference, in steps of the output's encoding.
    """

    name: str
    sqnr_db: float | None
    differing: float
    most_steps: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All outputs of one step on one device.

    Attributes:
        graph: name of the graph.
        job: id of the job.
        outputs: in the order of the graph.
        top1_equal: both have the same most likely token.
    """

    graph: str
    job: str
    outputs: list[OutputError]
    top1_equal: bool

    @property
    def worst(self) -> OutputError:
        """The output with the lowest SQNR."""
        return min(self.outputs, key=lambda each: math.inf if each.sqnr_db is None else each.sqnr_db)


def compare(
    manifest: Manifest, graph: str, job: str, expected: Tensors, found: Mapping[str, list[NDArray[Any]]]
) -> Comparison:
    """Compare in real numbers, whether the device gave integers or dequantized them.

    Args:
        manifest: has the encodings.
        graph: name of the graph.
        job: id of the job.
        expected: the CPU engine's integers.
        found: as the client gives them, a list with one array for each output, in the graph's order. Outputs that
            the service has numbered (`output_0`) are taken in that order.

    Raises:
        ServiceError: an output is missing or has another shape.
    """
    named = dict(found)
    if len(named) == len(expected) and all(name.startswith("output_") for name in named):
        named = dict(zip(expected, found.values(), strict=True))
    encodings = {tensor.new: manifest.encodings[tensor.past] for tensor in manifest.cache_geometry.names()}
    encodings[LOGITS] = manifest.encodings[LOGITS]
    errors = []
    for name, wanted in expected.items():
        value = named[name][0] if named.get(name) else None
        if value is None or value.size != wanted.size:
            raise ServiceError(
                f"AI Hub: {name} of job {job}",
                got="no such output" if value is None else f"shape {list(value.shape)}",
                expected=f"shape {list(wanted.shape)}",
                fix="Compile again with --force; if that does not help, report the job to AI Hub.",
            )
        errors.append(_error(name, encodings[name], wanted, value.reshape(wanted.shape)))
    top1 = np.argmax(expected[LOGITS]) == np.argmax(named[LOGITS][0])
    return Comparison(graph=graph, job=job, outputs=errors, top1_equal=bool(top1))


def _error(name: str, encoding: Encoding, wanted: NDArray[Any], value: NDArray[Any]) -> OutputError:
    reals = encoding.dequantize(wanted).astype(np.float64)
    others = value if np.issubdtype(value.dtype, np.floating) else encoding.dequantize(value)
    difference = reals - others
    noise, signal = float(np.square(difference).sum()), float(np.square(reals).sum())
    return OutputError(
        name=name,
        sqnr_db=None if noise == 0 else 10 * math.log10(max(signal, 1e-300) / noise),
        differing=float(np.count_nonzero(difference) / difference.size),
        most_steps=float(np.abs(difference).max() / encoding.scale),
    )
