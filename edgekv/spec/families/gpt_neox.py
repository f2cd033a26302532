"""GPT-NeoX, Pythia, RedPajama and their like: LayerNorm with biases, GELU, blocks in parallel behind two norms."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import Activation, DecoderSpec
from edgekv.spec.llama_like import ATTENTION, llama_like, same_window, with_layer_norms
from edgekv.spec.rope import THETA

MODEL_TYPES = ("gpt_neox",)

STORED_NAMES = (
    ("model.embed_tokens.", "gpt_neox.embed_in."),
    ("model.layers.", "gpt_neox.layers."),
    ("model.norm.", "gpt_neox.final_layer_norm."),
    ("lm_head.", "embed_out."),
    ("self_attn.qkv_proj", "attention.query_key_value"),
    ("self_attn.o_proj", "attention.dense"),
    ("mlp.up_proj", "mlp.dense_h_to_4h"),
    ("mlp.down_proj", "mlp.dense_4h_to_h"),
)
GELU: dict[str, Activation] = {"gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_fast": "gelu-tanh"}
GELU |= {"gelu_pytorch_tanh": "gelu-tanh"}


def describe(config: Config) -> DecoderSpec:
    """A decoder with as many heads of keys as of queries, whose rows are stored head by head (arXiv 2204.06745)."""
    if (name := config.text("hidden_act", "gelu")) not in GELU:
        raise config.refusal("hidden_act", " or ".join(GELU))
    config.ignore("rms_norm_eps")
    config.expect("num_key_value_heads", config.size("num_attention_heads"))
    theta, rotated = config.number("rotary_emb_base", THETA), config.number("rotary_pct", 0.25)
    config = config.changed(rope_theta=theta, partial_rotary_factor=rotated)  # fields of these names are not read
    config = config.with_defaults(max_position_embeddings=2048)
    spec = replace(llama_like(config, partial=True), activation=GELU[name], gated=False, stored_names=STORED_NAMES)
    if spec.head_dim * spec.heads != spec.hidden:
        raise config.refusal("head_dim", f"hidden_size / num_attention_heads = {spec.hidden / spec.heads:g}")
    attention = ATTENTION if config.flag("attention_bias", True) else frozenset[str]()
    spec = with_layer_norms(spec, config.number("layer_norm_eps", 1e-5), attention | {"mlp.up_proj", "mlp.down_proj"})
    return replace(
        spec,
        fused=frozenset({"heads"}),
        parallel="two-norms" if config.flag("use_parallel_residual", True) else None,
        windows=same_window(config, spec.layers, None),
    )
