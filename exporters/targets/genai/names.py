"""Names of tensors in the graphs for onnxruntime-genai."""

from __future__ import annotations

POSITION_IDS = "position_ids"
HELD_TOKENS = "held_tokens"
FLOAT_LOGITS = "float_logits"


def past_name(kind: str, layer: int | str) -> str:
    """The graph input that stacks the heads of a layer; with the layer `%d`, onnxruntime-genai's template for it."""
    return f"past_{kind}_{layer}_in"


def new_name(kind: str, layer: int | str) -> str:
    """The graph output that stacks the heads of a layer."""
    return f"past_{kind}_{layer}_out"
