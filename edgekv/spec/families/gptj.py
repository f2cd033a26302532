"""GPT-J: attention and GELU without a gate in parallel on one LayerNorm, a part of each head rotated in pairs."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.llama_like import llama_like, with_layer_norms
from edgekv.spec.rope import THETA, Rope

MODEL_TYPES = ("gptj",)

NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
DEFAULTS = {"max_position_embeddings": 2048, "rotary_dim": 64}
STORED_NAMES = (
    ("model.embed_tokens.", "transformer.wte."),
    ("model.layers.", "transformer.h."),
    ("model.norm.", "transformer.ln_f."),
    ("input_layernorm", "ln_1"),
    ("self_attn.o_proj", "attn.out_proj"),
    ("self_attn.", "attn."),
    ("mlp.up_proj", "mlp.fc_in"),
    ("mlp.down_proj", "mlp.fc_out"),
)


def describe(config: Config) -> DecoderSpec:
    """A decoder in parallel whose head has a bias too."""
    config.expect("activation_function", "gelu_new", "gelu_pytorch_tanh")
    config.expect("scale_attn_weights", True)
    config.ignore("rms_norm_eps", "rotary", "rope_theta")
    config = config.with_names(**NAMES).with_defaults(**DEFAULTS)
    config = config.with_defaults(intermediate_size=4 * config.size("hidden_size"))
    spec = llama_like(config)
    if (width := config.size("rotary_dim")) % 2 or width > spec.head_dim:
        raise config.refusal("rotary_dim", f"an even number of at most {spec.head_dim} elements of a head")
    spec = replace(
        spec,
        activation="gelu-tanh",
        gated=False,
        parallel="one-norm",
        pairs="interleaved",
        rope=Rope("default", THETA, width, {}),
        stored_names=STORED_NAMES,
    )
    biased = frozenset({"mlp.up_proj", "mlp.down_proj", "lm_head"})
    return with_layer_norms(spec, config.number("layer_norm_epsilon", 1e-5), biased)
