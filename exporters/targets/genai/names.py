"""Names of tensors in the graphs for onnxruntime-genai."""

from __future__ import annotations

POSITION_IDS = "position_ids"
HELD_TOKENS = "held_tokens"
FLOAT_LOGITS = "float_logits"
