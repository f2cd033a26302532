"""Advice for the tensors whose own quantization error is largest."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.bundle import RecipeRecord
from exporters.inspect.report import Advice, TensorLoss, TokenSpan
from quant import WEIGHT_TYPES

_HARMLESS_DB = 45.0


def worst(
    losses: Sequence[TensorLoss], recipe: RecipeRecord, spans: Sequence[TokenSpan] = (), most: int = 10
) -> list[Advice]:
    """The tensors with the largest own quantization error, worst first."""
    spanned = {span.name: span for span in spans}
    chosen = sorted(losses, key=lambda loss: loss.own_db)[:most]
    return [
        Advice(
            name=loss.name,
            own_db=loss.own_db,
            sqnr_db=loss.sqnr_db,
            suggestion=suggestion(loss, recipe, spanned.get(loss.name)),
        )
        for loss in chosen
    ]


def suggestion(loss: TensorLoss, recipe: RecipeRecord, span: TokenSpan | None = None) -> str:
    """How to reduce this tensor's own error."""
    if loss.own_db >= _HARMLESS_DB:
        return "no action: the error is small"
    if span is not None and span.position == 0:
        return f"--sink auto: {span.text!r} at position 0 spans the range, {span.ratio:,.0f} x all other tokens"
    if span is not None:
        return f"no action: {span.text!r} spans the range, {span.ratio:,.0f} x all other tokens"
    if loss.kind == "weight":
        return _for_matrix(loss, recipe)
    if loss.clipped > 0.5:
        return "calibrate on similar text (--calibration): values exceed the calibrated range"
    if loss.kind == "state" and loss.dtype in ("u8", "s8"):
        return "states of 16 bits (--state-bits 16)"
    if loss.kind in ("key", "value") and loss.dtype in ("u8", "s8"):
        wide = "" if loss.outlier is None else f"; channel {loss.outlier} widens the range of all"
        return f"s16 cache (--kv s16, V73 and later){wide}"
    if loss.outlier is not None:
        turned = ' (for the residual: "rotation": "hadamard")' if recipe.rotation == "none" else ""
        return f"outlier channel {loss.outlier} takes most of the range{turned}"
    return "no action: already the widest type"


def _for_matrix(loss: TensorLoss, recipe: RecipeRecord) -> str:
    record = next(weight for weight in recipe.weights if weight.tensor == loss.name)
    blame = "" if loss.outlier is None else f"; input {loss.outlier} causes most of the error"
    if WEIGHT_TYPES[record.dtype].bits < 8:
        return f"int8 for this matrix{blame}"
    if record.method == "nearest":
        return f"method gptq instead of nearest{blame}"
    if blame and recipe.rotation == "none":
        return f'"rotation": "hadamard"{blame}'
    return f"no action: already the widest type{blame}"
