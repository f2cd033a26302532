"""A tiny model of random weights of each architecture, for the graphs of a conformance kit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgekv.spec import Config, describe, views

_BYTES = 256
_VOCAB = 320
_GAIN = 2.0  # attention is as sharp as a trained model's, and rounding is amplified
_WINDOW = {"sliding_window": 24}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
_TANH: dict[str, Any] = {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"}
_LAYER_NORM: dict[str, Any] = {"rms_norm_eps": None}
_AS_MANY_KEYS: dict[str, Any] = {"num_key_value_heads": None, "head_dim": None}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.6,
    "logits_scaling": 5.0,
}
_EXPERTS = {"num_experts_per_tok": 2}
_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": _VOCAB,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "apertus": {"hidden_act": "xielu", "tie_word_embeddings": False},
    "arcee": {"hidden_act": "relu2", "mlp_bias": True, "rope_theta": None, "rope_parameters": _YARN},
    "bamba": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_d_head": 16,
    },
    "cohere": {**_LAYER_NORM, "logit_scale": 0.3},
    "cohere2": {
        **_LAYER_NORM,
        **_WINDOW,
        "logit_scale": 0.25,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "cwm": {**_WINDOW, "layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": False},
    "ernie4_5": {"use_bias": True},
    "exaone": {
        **_LAYER_NORM,
        "num_hidden_layers": None,
        "num_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "hidden_act": None,
        "activation_function": "silu",
    },
    "exaone4": {**_WINDOW, "sliding_window_pattern": 3, "num_hidden_layers": 3},
    "falcon_h1": {
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_d_state": 16,
        "embedding_multiplier": 3.0,
        "attention_in_multiplier": 1.5,
        "key_multiplier": 0.4,
        "ssm_multipliers": [0.7, 0.5, 0.9, 1.1, 0.8],
        "mlp_multipliers": [0.9, 0.6],
    },
    "gemma": {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 1},
    "gemma2": {
        **_TANH,
        **_WINDOW,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        **_TANH,
        **_WINDOW,
        "model_type": "gemma3_text",
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 24,
    },
    "gemma4": {
        **_TANH,
        **_WINDOW,
        "model_type": "gemma4_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "global_head_dim": 32,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": _VOCAB,
        "final_logit_softcapping": 3.0,
    },
    "glm": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "gpt_neox": {
        **_LAYER_NORM,
        **_AS_MANY_KEYS,
        "hidden_act": "gelu",
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
    },
    "gptj": {
        **_LAYER_NORM,
        **_AS_MANY_KEYS,
        **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")),
        **dict.fromkeys(("hidden_act", "intermediate_size", "rope_theta")),
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "rotary_dim": 8,
        "activation_function": "gelu_new",
        "tie_word_embeddings": False,
    },
    "granite": _MULTIPLIERS,
    "granitemoe": {**_MULTIPLIERS, **_EXPERTS, "intermediate_size": 32, "num_local_experts": 4},
    "granitemoehybrid": {
        **_MULTIPLIERS,
        "layer_types": ["attention"] * 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
    },
    "helium": {},
    "hunyuan_v1_dense": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0},
    },
    "hyperclovax": _MULTIPLIERS,
    "internlm3": {"qkv_bias": True, "bias": True},
    "iquestcoder": {},
    "jais2": {**_LAYER_NORM, "hidden_act": "relu2", "tie_word_embeddings": False},
    "lfm2": {
        **_LAYER_NORM,
        "hidden_act": None,
        "norm_eps": 1e-5,
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {
        **_LAYER_NORM,
        **_EXPERTS,
        "hidden_act": None,
        "norm_eps": 1e-5,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "moe_intermediate_size": 32,
        "num_experts": 4,
    },
    "lfm3": {**_LAYER_NORM, **_WINDOW, "hidden_act": None, "norm_eps": 1e-5, "num_hidden_layers": 3},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama4": {
        "model_type": "llama4_text",
        "intermediate_size_mlp": 96,
        "moe_layers": [],
        "no_rope_layers": [1, 0],
        "attn_temperature_tuning": False,
        "attention_chunk_size": 192,
    },
    "mellum": {
        **_EXPERTS,
        **_WINDOW,
        "rope_theta": None,
        "layer_types": ["full_attention", "sliding_attention"],
        "moe_intermediate_size": 32,
        "num_experts": 4,
    },
    "ministral": {**_WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
    "ministral3": {
        "rope_theta": None,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    "mistral": _WINDOW,
    "nanochat": {
        "hidden_act": "relu2",
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": False,
    },
    "nemotron": {**_LAYER_NORM, "hidden_act": "relu2", "norm_eps": 1e-5},
    "nemotron_h": {
        "hidden_act": None,
        "mlp_hidden_act": "relu2",
        "rms_norm_eps": None,
        "rope_theta": None,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "mlp", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 16,
    },
    "olmo": _LAYER_NORM,
    "olmo2": {},
    "olmo3": {
        **_WINDOW,
        "rope_theta": None,
        "rope_parameters": {
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmoe": {**_EXPERTS, "intermediate_size": 32, "num_experts": 4},
    "phi": {**_LAYER_NORM, "hidden_act": "gelu_new", "tie_word_embeddings": False},
    "phi3": {**_WINDOW, "partial_rotary_factor": 0.75},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 0],
        },
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": 32, "num_experts": 4, "norm_topk_prob": True},
    "seed_oss": {"attention_bias": True, "head_dim": 32},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {**_LAYER_NORM, "partial_rotary_factor": 0.25, "use_qkv_bias": True},
    "starcoder2": {**_LAYER_NORM, "hidden_act": "gelu_pytorch_tanh", "use_bias": True},
    "vaultgemma": {
        **_TANH,
        **_WINDOW,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
}
"""Configurations as differences from `_BASE`, by the modules of `edgekv.spec.families`; None removes a field."""

OF_PICTURES: Mapping[str, str] = {
    "internvl": "qwen2",
    "lfm2_vl": "lfm2",
    "mistral3": "ministral3",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "smolvlm": "llama",
}
"""Families with a vision encoder beside the decoder of another one, whose graphs they have; `encoders` has encoders."""
EMBEDDERS = ("embedding_gemma2",)
"""Families that write no text: kits compare decoders with a cache."""
DRAFTERS = ("gemma4_assistant", "qwen3_5_mtp")
"""Families that run beside a target alone, on whose cache or hidden states they depend."""


def family_config(name: str) -> dict[str, Any]:
    """The `config.json` of a tiny model."""
    config = {**_BASE, "model_type": name, **FAMILIES[name]}
    # Mistral and Phi-3 tell null from absent.
    return {key: value for key, value in config.items() if value is not None}


def write_family(name: str, folder: Path, seed: int = 0) -> Path:
    """Write a checkpoint of random weights."""
    folder.mkdir(parents=True)
    config = family_config(name)
    weights = described_weights(config, seed, _GAIN)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: value.astype(ml_dtypes.bfloat16) for key, value in weights.items()}, folder / "model.safetensors")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([f"<|{number}|>" for number in range(4)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def described_weights(config: dict[str, Any], seed: int, gain: float) -> dict[str, np.ndarray[Any, Any]]:
    """Random tensors by the names that transformers gives them, with the shapes of an architecture's description.

    Args:
        config: its `config.json`.
        seed: of the random numbers.
        gain: standard deviation of a matrix's results, for inputs of 1. Rates of decay are 0.01 to 2.

    Returns:
        float32 values that bfloat16 holds exactly.
    """
    random, spec = np.random.Generator(np.random.PCG64(seed)), describe(Config(config))
    weights = dict[str, np.ndarray[Any, Any]]()
    for view in views(spec):
        if view.key not in weights and view.is_stored:
            is_gain = view.role.endswith("norm") or view.role == "layer_scalar"
            is_gain = is_gain or (view.is_gathered and len(view.shape) == 1)
            scale = 0.1 if is_gain else gain / np.sqrt(view.shape[-1])
            values = scale * random.standard_normal(view.stored_shape) + (is_gain and not view.offset)
            if view.role == "q_norm" and spec.query_gain == 1:
                values /= 4  # scores of noise would be too sharp
            if view.role == "delta_rate":
                values = np.log(np.geomspace(0.01, 2, len(values)))
            weights[view.key] = values.astype(ml_dtypes.bfloat16).astype(np.float32)
        if view.role == "activation":
            at = view.key.rpartition(".")[0]
            weights |= {f"{at}.beta": np.array(0.5, np.float32), f"{at}.eps": np.array(-1e-6, np.float32)}
    return weights


def byte_tokenizer() -> Tokenizer:
    """A token for each byte."""
    alphabet = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    assert len(alphabet) == _BYTES
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
