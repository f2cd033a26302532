"""LayerNorm as RMSNorm: the residual has the mean 0 if all that is added to it has, and then both are the same.

So the embeddings, and the matrices and biases that write the residual, are read without the mean of their outputs. No
graph takes a mean away. A head that is tied to the embeddings keeps its rows as they are stored.
"""

from __future__ import annotations

from edgekv.spec import View
from exporters.checkpoint.fold import Floats, Fold


def center_residual(view: View) -> Fold | None:
    """The fold of a tensor of a decoder with LayerNorm; None if it stays."""
    if view.role == "embedding":
        return Fold(in_map=_centered_rows)
    return Fold(out_map=_centered_outputs) if view.writes_residual else None


def _centered_rows(rows: Floats) -> Floats:
    """Embeddings `[..., hidden]`."""
    rows -= rows.mean(axis=-1, keepdims=True)
    return rows


def _centered_outputs(outputs: Floats) -> Floats:
    """A matrix `[hidden, in]` or a bias `[hidden]`."""
    centered: Floats = outputs - outputs.mean(axis=0)
    return centered
