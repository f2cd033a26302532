"""Names of tensors that stack the heads of a layer."""

from __future__ import annotations


def past_name(kind: str, layer: int | str) -> str:
    """The graph input that stacks the heads of a layer; with the layer `%d`, onnxruntime-genai's template for it."""
    return f"past_{kind}_{layer}_in"


def new_name(kind: str, layer: int | str) -> str:
    """The graph output that stacks the heads of a layer."""
    return f"past_{kind}_{layer}_out"
