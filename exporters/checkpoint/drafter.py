"""The tensors of a drafter, under the names and in the form in which its graphs read them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from edgekv.errors import CheckpointError
from edgekv.spec import EMBEDDING, HEAD, TARGET_IN, TARGET_OUT, DecoderSpec
from exporters.checkpoint.fold import EVERY, Floats, Rows
from exporters.checkpoint.stored import ComputedTensor, Stored

_CLUSTERS = "masked_embedding."
"""What chooses the clusters of tokens whose logits are computed; here all are."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class TargetTensors(Protocol):
    """What a drafter's tensors are made from, of its target as its bundle has it."""

    def tensor(self, key: str, rows: Rows = EVERY) -> Floats:
        """As `Checkpoint.tensor`."""

    def as_head(self, rows: Floats) -> Floats:
        """As `Checkpoint.as_head`."""


@dataclass(frozen=True, slots=True)
class _Table(ComputedTensor):
    """The target's embeddings, projected to the drafter's width."""

    target: TargetTensors
    projection: Floats
    file: Path
    shape: tuple[int, ...]

    def read(self, rows: Rows) -> Floats:
        found: Floats = self.target.tensor(EMBEDDING, rows) @ self.projection.T
        return found


@dataclass(frozen=True, slots=True)
class _Matrix(ComputedTensor):
    """A small matrix that is kept in memory."""

    values: Floats
    file: Path

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.values.shape

    def read(self, rows: Rows) -> Floats:
        return self.values[rows].copy()


def drafter_tensors(stored: Mapping[str, Stored], spec: DecoderSpec, target: TargetTensors) -> dict[str, Stored]:
    """The tensors by name: layers are numbered behind those of the target.

    Args:
        stored: of the files.
        spec: the drafter.
        target: as its bundle has it.

    Raises:
        CheckpointError: a projection is missing or of another shape.
    """
    assert spec.target is not None, "a drafter"
    hidden, width = spec.target.hidden, spec.hidden
    found = {
        _LAYER.sub(lambda match: f"model.layers.{spec.first_layer + int(match[1])}.", key): each
        for key, each in stored.items()
        if not key.startswith(_CLUSTERS)
    }
    joined, back = (
        _projection(found, key, shape)
        for key, shape in ((TARGET_IN, (width, 2 * hidden)), (TARGET_OUT, (hidden, width)))
    )
    if EMBEDDING not in found:
        return found  # the check of all tensors names it
    head = found.pop(EMBEDDING)
    found.setdefault(HEAD, head)
    embedded, read = np.split(joined.read(EVERY), 2, axis=1)
    gains = 1 / target.as_head(np.ones((1, hidden), np.float32))
    found[EMBEDDING] = _Table(target, embedded, head.file, (spec.vocab, width))
    found[TARGET_IN] = _Matrix(target.as_head(read), joined.file)
    found[TARGET_OUT] = _Matrix(back.read(EVERY) * gains.T, back.file)
    return found


def _projection(found: Mapping[str, Stored], key: str, shape: tuple[int, int]) -> Stored:
    stored = found.get(key)
    if stored is None or stored.shape != shape:
        raise CheckpointError(
            f"weights: {key}",
            got="no such tensor" if stored is None else f"shape {list(stored.shape)}",
            expected=f"shape {list(shape)}, as config.json and the target say",
            fix="Give the target that the drafter was trained for.",
        )
    return stored
