"""nanochat: norms without weights, of embeddings and behind the rotation too, and ReLU^2 without a gate."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import ATTENTION, llama_like, same_window

MODEL_TYPES = ("nanochat",)

STORED_NAMES = (("mlp.up_proj", "mlp.fc1"), ("mlp.down_proj", "mlp.fc2"))


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder, turned by the opposite angles: the halves of queries and keys change places."""
    config.expect("hidden_act", "relu2")
    config = config.with_defaults(max_position_embeddings=2048)
    spec = llama_like(config)
    return replace(
        spec,
        activation="relu2",
        gated=False,
        norm_weights=False,
        embedding_norm=True,
        qk_norm="head",
        qk_norm_last=True,
        pairs="swapped",
        logits_cap=config.optional_number("final_logit_softcapping", 15.0),
        biased=ATTENTION if config.flag("attention_bias") else frozenset[str](),
        windows=same_window(config, spec.layers, None),
        stored_names=STORED_NAMES,
    )
