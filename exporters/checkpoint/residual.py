"""What a decoder's own form folds into its weights: the same logits, with RMSNorm alone in its graphs.

LayerNorm is RMSNorm if the residual has the mean 0, and it has if all that is added to it has. So the embeddings, and
the matrices and biases that write the residual, are read without the mean of their outputs. No graph takes a mean away.
A head that is tied to the embeddings keeps its rows as they are stored. A norm of the embeddings depends on the token
alone: rows of the table are read with it.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from edgekv.spec import DecoderSpec, View
from exporters.checkpoint.fold import Floats, Fold, Transform


def stored_folds(spec: DecoderSpec) -> tuple[Transform, ...]:
    """What is folded into the stored tensors of a decoder before anything else."""
    return (*([partial(_normalize, spec.eps)] if spec.embedding_norm else []), *([_center] if spec.layer_norms else []))


def _center(view: View) -> Fold | None:
    if view.role == "embedding":
        return Fold(in_map=_centered_rows)
    return Fold(out_map=_centered_outputs) if view.writes_residual else None


def _normalize(eps: float, view: View) -> Fold | None:
    return Fold(in_map=partial(_normalized_rows, eps)) if view.role == "embedding" else None


def _centered_rows(rows: Floats) -> Floats:
    """Embeddings `[..., hidden]`."""
    rows -= rows.mean(axis=-1, keepdims=True)
    return rows


def _centered_outputs(outputs: Floats) -> Floats:
    """A matrix `[hidden, in]` or a bias `[hidden]`."""
    centered: Floats = outputs - outputs.mean(axis=0)
    return centered


def _normalized_rows(eps: float, rows: Floats) -> Floats:
    """Embeddings `[..., hidden]`."""
    rows /= np.sqrt(np.square(rows).mean(axis=-1, keepdims=True) + np.float32(eps))
    return rows
