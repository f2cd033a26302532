"""A trace: the values of every named result of a decoder for one window of tokens."""

from __future__ import annotations

import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import UsageError
from edgekv.graphs.decoder import decoder_layer, logits
from edgekv.graphs.delta_rule import BY_STEP
from edgekv.machine.scratch import atomic_file
from edgekv.spec.decoder import DecoderSpec
from exporters.checkpoint.tensors import Tensors
from exporters.quantize.reference import Floats, NumpyOps, Observer, Weights

Trace = Mapping[str, Floats]
"""Results in the order of computation, each `[T, width]`.

Names are those of `edgekv.graphs.decoder`; a second result of the same name gets the suffix `.2`. Keys, values and
rows of states have the names of their cache tensors. Left out are attention scores, whose width is the context, squares
of stored roots, which have rows of the past too, and signs, which differ where a value is almost 0; of a gated delta
rule, what depends on how the text is divided into steps.
"""

_LEFT_OUT = re.compile(rf"\.(scores|stored)\.|\.sign$|{BY_STEP}|^recurrent_state_")


def trace_reference(tensors: Tensors, tokens: Sequence[int], context: int | None = None, *, first: int = 0) -> Trace:
    """The trace of the float reference for tokens from position `first` on.

    Args:
        tensors: the weights, with the same rotation as the bundle that it is compared with.
        tokens: token ids, from position 0 on.
        context: context length for the rotary embedding; None for the number of tokens.
        first: the first position that is traced.
    """
    return merged(trace_stages(tensors, [np.asarray(tokens)], context, first=first))


def trace_stages(
    tensors: Tensors,
    windows: Sequence[NDArray[Any]],
    context: int | None = None,
    make_ops: Callable[[DecoderSpec, Weights, int, int, Observer], NumpyOps] = NumpyOps,
    *,
    first: int = 0,
) -> Iterator[Trace]:
    """One layer at a time, then the head: the values of every window of token ids `[T]`, from position `first` on."""
    spec, weights = tensors.spec, Weights(tensors)
    seen: list[tuple[str, Floats]] = []

    def observe(name: str, values: Floats) -> None:
        if not _LEFT_OUT.search(name):
            seen.append((name, values))

    def stage(tokens: int) -> dict[str, Floats]:
        """The results of the tokens since the last call."""
        trace = {name: values[first:] for name, values in _numbered(seen, tokens)}
        seen.clear()
        return trace

    ops = {n: make_ops(spec, weights, n, context or n, observe) for n in {len(window) for window in windows}}
    states = list(windows)
    for layer in range(spec.layers):
        for number, state in enumerate(states):
            of = ops[len(state)]
            of.begin(number, windows[number])
            hidden = of.embed(state, "embedding") if layer == 0 else state
            states[number] = decoder_layer(of, spec, layer, hidden)
            yield stage(len(state))
        weights.drop()
    for state in states:
        rows = logits(ops[len(state)], spec, state)[first:]
        yield stage(len(state)) | {"logits": rows}


def _numbered(seen: Sequence[tuple[str, Floats]], tokens: int) -> Iterator[tuple[str, Floats]]:
    """The results of `tokens` tokens, with the numbers of their uses; parts of one that was computed in steps, joined.

    Every step computes the same results in the same order.
    """
    parts: defaultdict[str, list[Floats]] = defaultdict(list)
    for name, values in seen:
        if len(values) < tokens:
            parts[name].append(values)
    numbers: Counter[str] = Counter()
    first: Counter[str] = Counter()
    for name, values in seen:
        if len(values) < tokens:
            pieces, use = parts[name], first[name]
            uses = sum(len(piece) for piece in pieces) // tokens
            first[name] += 1
            if use >= uses:
                continue  # a part of one that was given
            values = np.concatenate(pieces[use::uses])
        numbers[name] += 1
        yield name if numbers[name] == 1 else f"{name}.{numbers[name]}", values


def merged(stages: Iterable[Trace]) -> Trace:
    """Join the parts of one window's trace."""
    return {name: values for stage in stages for name, values in stage.items()}


def write_trace(trace: Trace, file: Path) -> None:
    """Write a trace as `.npz`, one array per result, in order; the file appears atomically.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        with atomic_file(file) as partial, partial.open("wb") as target:
            np.savez(target, **{name: np.asarray(values, np.float32) for name, values in trace.items()})
    except OSError as error:
        raise UsageError(
            str(file), got=error.strerror, expected="a file that can be written", fix="Choose another place."
        ) from None


def read_trace(file: Path) -> Trace:
    """Read a trace, or any `.npz` of numeric arrays whose last axis is the width.

    Raises:
        UsageError: the file is not a readable trace.
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


def _unreadable(file: Path, got: str) -> UsageError:
    return UsageError(
        str(file), got=got, expected="a .npz file with an array for each result", fix="Make it with edgekv trace."
    )
