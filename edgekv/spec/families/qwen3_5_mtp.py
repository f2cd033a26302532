"""Qwen3.5's own head for further tokens (`mtp`): one layer that drafts for the model whose checkpoint has it.

Row t reads the embedding of token t+1 and the model's last hidden state of token t. Both are normalized, joined and
projected; gated full attention over all rows so far and a feed-forward follow. The model's own head gives the logits of
token t+2, and the result of the last norm stands for the model's next hidden state in the next step of a draft.
"""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec, TargetState
from edgekv.spec.drafter import OTHER_TARGET
from edgekv.spec.families import qwen3_5

DRAFTER_TYPES = qwen3_5.MODEL_TYPES


def describe_drafter(config: Config, target: DecoderSpec) -> DecoderSpec:
    """The head as a decoder of one layer with a cache of its own."""
    model = qwen3_5.describe(config)
    text = config.table("text_config") if config.text("model_type") == "qwen3_5" else config
    text.expect("mtp_num_hidden_layers", 1)
    text.expect("mtp_use_dedicated_embeddings", False)
    for field, own, shared in (
        ("hidden_size", model.hidden, target.hidden),
        ("vocab_size", model.vocab, target.vocab),
    ):
        if own != shared:
            raise text.refusal(field, f"the target's {shared}", got=str(own), fix=OTHER_TARGET)
    return replace(
        model,
        model_type="qwen3_5_mtp",
        layers=1,
        max_positions=target.max_positions,
        tied_head=False,  # the table and the head's matrix are rounded apart
        delta_rule=None,
        multimodal=False,
        target=TargetState(0, target.hidden),
    )
