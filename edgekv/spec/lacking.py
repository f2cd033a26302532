"""What decoders of transformers have that graphs do not, for a refusal in one sentence."""

from __future__ import annotations

from collections.abc import Mapping

_TYPES: Mapping[str, str] = {
    "experts": """
    afmoe cohere2_moe dbrx dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe gpt_oss granitemoe granitemoeshared
    granitemoe_swa hunyuan_v1_moe hy_v3 jetmoe laguna lfm2_moe mellum minimax_m2 mixtral olmoe phimoe qwen2_moe
    qwen3_moe qwen3_5_moe qwen3_5_moe_text qwen3_vl_moe qwen3_vl_moe_text solar_open
    """,
    "experts and gated delta rules": "qwen3_next",
    "experts and linear attention": "minimax",
    "latent attention": """
    deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_linear longcat_flash minicpm3 mistral4 youtu
    """,
    "Mamba layers": "bamba falcon_h1 falcon_mamba jamba mamba mamba2 nemotron_h zamba zamba2",
    "recurrent layers": "recurrent_gemma rwkv xlstm",
    "gated delta rules behind norms of their own": "olmo_hybrid",
    "positions by a table": "biogpt gpt2 gpt_bigcode gpt_neo opt xglm",
    "positions by biases of scores (ALiBi)": "bloom falcon mpt",
    "differential attention": "diffllama",
    "masks that depend on the text": "doge",
    "ternary weights": "bitnet",
    "LayerNorm with biases": "codegen gpt_neox gptj jais2 persimmon",
    "a feed-forward without a gate": "nanochat",
    "xIELU": "apertus",
    "q and k norms without weights": "llama4 llama4_text",
    "a rotary embedding for each layer": "granite_swa",
    "Laurel, AltUp and activation sparsity": "gemma3n gemma3n_text",
}
LACKING: Mapping[str, str] = {each: what for what, types in _TYPES.items() for each in types.split()}
"""By `model_type`."""
