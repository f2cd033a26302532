"""Gemma 4's drafters: a few layers that read the keys and values of the model that they draft for, their target.

A step reads the embedding of the last token, from the target's table, and the target's last hidden state, both
projected to the drafter's width. It gives logits, and a guess of the target's next hidden state, which the next step of
the same draft reads. Its queries have the position of the last token in all steps of a draft, since no step adds keys.
"""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.drafter import OTHER_TARGET, behind_target
from edgekv.spec.families import gemma4

DRAFTER_TYPES = ("gemma4_assistant",)

HIDDEN = 1536  # of the target; default of an absent field


def describe_drafter(config: Config, target: DecoderSpec) -> DecoderSpec:
    """The drafter's layers, behind those of its target.

    With `use_ordered_embeddings`, transformers computes the logits of the likeliest clusters of tokens alone. All
    logits have the same greatest one, unless that is in another cluster, so the clusters are left out.
    """
    text = config.table("text_config").with_defaults(model_type="gemma4_text")
    text.expect("model_type", "gemma4_text")
    text.expect("use_double_wide_mlp", False)
    config.ignore("tie_word_embeddings")  # its table of embeddings is its head, or the file has one
    layers = text.size("num_hidden_layers")
    if text.count("num_kv_shared_layers", layers) not in (0, layers):
        raise text.refusal("num_kv_shared_layers", f"all {layers} layers, which read the target's keys and values")
    if text.count("hidden_size_per_layer_input", 0):
        raise text.refusal("hidden_size_per_layer_input", "0", fix="This variant of the drafter cannot be exported.")
    own = gemma4.describe(text.changed(num_kv_shared_layers=0, hidden_size_per_layer_input=0))
    if (width := config.size("backbone_hidden_size", HIDDEN)) != target.hidden:
        raise config.refusal("backbone_hidden_size", f"the target's {target.hidden}", got=str(width), fix=OTHER_TARGET)
    if own.vocab != target.vocab:
        raise text.refusal("vocab_size", f"the target's {target.vocab}", fix=OTHER_TARGET)
    drafter = behind_target(text, own, target)
    return replace(drafter, model_type=config.text("model_type"), logits_cap=None)
