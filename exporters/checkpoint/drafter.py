"""The tensors of a drafter, under the names and in the form in which its graphs read them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from edgekv.errors import CheckpointError
from edgekv.spec import (
    EMBEDDING,
    EMBEDDING_IN,
    HEAD,
    TARGET_FRAME,
    TARGET_IN,
    TARGET_OUT,
    DecoderSpec,
    text_tensor,
)
from edgekv.spec.tensors import FURTHER_TOKENS
from exporters.checkpoint.fold import EVERY, Floats, Rows
from exporters.checkpoint.stored import CheckpointTensor, ComputedTensor

_CLUSTERS = "masked_embedding."
"""What chooses the clusters of tokens whose logits are computed; here all are."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


_COMPARED_ROWS = slice(0, 256)
_MAX_DIFFERENCE = 0.2
"""Of the norm of these embeddings: far above what rounding to 4 bits costs, far below that of two models."""


class TargetTensors(Protocol):
    """What a drafter's tensors are made from, of its target as its bundle has it."""

    @property
    def spec(self) -> DecoderSpec:
        """The target."""

    def tensor(self, key: str, rows: Rows = EVERY) -> Floats:
        """As `Checkpoint.tensor`."""

    def as_head(self, rows: Floats) -> Floats:
        """As `Checkpoint.as_head`."""


@dataclass(frozen=True, slots=True)
class _OfTarget(ComputedTensor):
    """A tensor of the target, its rows projected to the drafter's width if there is a projection."""

    target: TargetTensors
    key: str
    file: Path
    shape: tuple[int, ...]
    projection: Floats | None = None

    def read(self, rows: Rows) -> Floats:
        rows_read = self.target.tensor(self.key, rows)
        return rows_read if self.projection is None else rows_read @ self.projection.T


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


def drafter_tensors(
    stored: Mapping[str, CheckpointTensor], spec: DecoderSpec, target: TargetTensors
) -> dict[str, CheckpointTensor]:
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
    renamed = {
        _LAYER.sub(lambda match: f"model.layers.{spec.first_layer + int(match[1])}.", key): tensor
        for key, tensor in stored.items()
        if not key.startswith(_CLUSTERS)
    }
    joined, back = (
        _projection(renamed, key, shape)
        for key, shape in ((TARGET_IN, (width, 2 * hidden)), (TARGET_OUT, (hidden, width)))
    )
    if EMBEDDING not in renamed:
        return renamed  # the check of all tensors names it
    head = renamed.pop(EMBEDDING)
    renamed.setdefault(HEAD, head)
    embedded, read = np.split(joined.read(EVERY), 2, axis=1)
    gains = 1 / target.as_head(np.ones((1, hidden), np.float32))
    renamed[EMBEDDING] = _OfTarget(target, EMBEDDING, head.file, (spec.vocab, width), embedded)
    renamed[TARGET_IN] = _Matrix(target.as_head(read), joined.file)
    renamed[TARGET_OUT] = _Matrix(back.read(EVERY) * gains.T, back.file)
    return renamed


def is_of_head(stored: str) -> bool:
    """Whether a checkpoint's tensor is one of its own head for further tokens."""
    return stored.removeprefix("model.").startswith(FURTHER_TOKENS)


def head_tensors(
    stored: Mapping[str, CheckpointTensor], spec: DecoderSpec, target: TargetTensors, frame: Floats
) -> dict[str, CheckpointTensor]:
    """The tensors of a model's own head for further tokens, whose embeddings and logits are the model's.

    Args:
        stored: of the files.
        spec: the head, a layer with a cache of its own.
        target: the model as its bundle has it.
        frame: from the hidden states that the bundle gives to those of the checkpoint, `[H, H]`.

    Raises:
        CheckpointError: the checkpoint has no such head, that of another model, or a projection of another shape.
    """
    own = {
        key.removeprefix("model.").removeprefix(FURTHER_TOKENS): tensor
        for key, tensor in stored.items()
        if is_of_head(key)
    }
    if not own:
        raise CheckpointError(
            f"weights: {FURTHER_TOKENS}*",
            got="no such tensor",
            expected="those of the model's own head for further tokens",
            fix="Give the checkpoint as it was published: other programs leave them out.",
        )
    table = next((tensor for key, tensor in stored.items() if text_tensor(key) == EMBEDDING), None)
    if table is not None and _differs(table, target):
        fix = "Give the checkpoint that the bundle was exported from."
        raise CheckpointError(f"weights: {EMBEDDING}", got="other embeddings", expected="the target's", fix=fix)
    hidden, head = spec.hidden, dict[str, CheckpointTensor]()
    joined = _projection(own, "fc.weight", (hidden, 2 * hidden))
    of_embedding, of_state = (
        _projection(own, f"pre_fc_norm_{name}.weight", (hidden,)).read(EVERY) + np.float32(spec.norm_offset)
        for name in ("embedding", "hidden")
    )
    taken = ("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
    head |= {f"model.{key}": tensor for key, tensor in own.items() if key not in taken}
    embedded, read = np.split(joined.read(EVERY), 2, axis=1)
    head[EMBEDDING_IN] = _Matrix(embedded * of_embedding, joined.file)
    head[TARGET_IN] = _Matrix(read * of_state, joined.file)
    head[TARGET_FRAME] = _Matrix(frame, joined.file)
    head[TARGET_OUT] = _Matrix(np.linalg.inv(frame).astype(np.float32), joined.file)
    shared = EMBEDDING if target.spec.tied_head else HEAD
    for name, key in ((EMBEDDING, EMBEDDING), (HEAD, shared)):
        head[name] = _OfTarget(target, key, joined.file, (spec.vocab, hidden))
    return head


def _differs(table: CheckpointTensor, target: TargetTensors) -> bool:
    """Whether embeddings are those of another model than the target."""
    if table.shape != (target.spec.vocab, target.spec.hidden):
        return True
    ours, theirs = table.read(_COMPARED_ROWS), target.tensor(EMBEDDING, _COMPARED_ROWS)
    return bool(np.linalg.norm(ours - theirs) > _MAX_DIFFERENCE * np.linalg.norm(theirs))


def _projection(tensors: Mapping[str, CheckpointTensor], key: str, shape: tuple[int, ...]) -> CheckpointTensor:
    stored = tensors.get(key)
    if stored is None or stored.shape != shape:
        raise CheckpointError(
            f"weights: {key}",
            got="no such tensor" if stored is None else f"shape {list(stored.shape)}",
            expected=f"shape {list(shape)}, as config.json and the target say",
            fix="Give the target that the drafter was trained for.",
        )
    return stored
