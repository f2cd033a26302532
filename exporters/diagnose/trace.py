"""The values of every named result of a decoder for one window of tokens."""

from __future__ import annotations

import os
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import UsageError
from exporters.checkpoint import Checkpoint
from exporters.reference import Floats, Reference

Trace = Mapping[str, Floats]
"""Results in the order in which they were computed, each `[T, width]`.

They have the names of `exporters.decoder`; the second result of one name has `.2` behind it. Keys and values stand
under the names of their cache tensors. Attention scores, whose width is the context, are left out.
"""


def trace_reference(checkpoint: Checkpoint, tokens: Sequence[int]) -> Trace:
    """What the float reference computes for tokens that begin at position 0."""
    uses: Counter[str] = Counter()
    trace: dict[str, Floats] = {}

    def observe(name: str, values: Floats) -> None:
        uses[name] += 1
        if ".scores." not in name:
            trace[name if uses[name] == 1 else f"{name}.{uses[name]}"] = values

    for logits in Reference(checkpoint).logits([np.asarray(tokens)], observe=observe):
        trace["logits"] = logits
    return trace


def write_trace(trace: Trace, file: Path) -> None:
    """Write a trace as `.npz`, one array for each result, in order; the file appears whole or not at all.

    Raises:
        UsageError: the file cannot be written.
    """
    partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as target:
            np.savez(target, **{name: np.asarray(values, np.float32) for name, values in trace.items()})
        partial.replace(file)
    except OSError as error:
        raise UsageError(
            str(file), found=error.strerror, wanted="a file that can be written", way_out="Choose another place."
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def read_trace(file: Path) -> Trace:
    """Read what `write_trace` wrote, or any `.npz` of numbers whose last axis is the width.

    Raises:
        UsageError: it is no such file.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            trace = {name: _rows(name, arrays[name]) for name in arrays.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise _unreadable(file, str(error) or type(error).__name__) from None
    if not trace:
        raise _unreadable(file, "no arrays")
    return trace


def _rows(name: str, values: NDArray[Any]) -> Floats:
    if values.dtype.kind not in "fiu" or not values.size or not values.ndim:
        raise ValueError(f"{name}: an array of {values.dtype} with shape {list(values.shape)}")
    rows: Floats = values.reshape(-1, values.shape[-1]).astype(np.float32)
    return rows


def _unreadable(file: Path, found: str) -> UsageError:
    return UsageError(
        str(file), found=found, wanted="a .npz file with an array for each result", way_out="Make it with edgekv trace."
    )
