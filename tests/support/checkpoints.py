"""Small random checkpoints in Hugging Face layout, the same on every machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, processors

from edgekv.spec import TARGET_IN, Config, describe, describe_drafter, views
from exporters.conformance.families import byte_tokenizer, described_weights

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NEWER: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
"""The form that transformers 5 writes."""
OLDER: dict[str, Any] = {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "tie_word_embeddings": False}
"""The form before it, with Llama 3's scaling and a head of its own."""


WIDE: dict[str, Any] = {
    **NEWER,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 2048,
}
"""Rows of 64 bytes, as every strategy wants them, and more bytes of weights than of graphs; few heads to compile."""

WINDOW = 24
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 3.0],
    "long_factor": [1.0, 1.5, 3.0, 6.0, 12.0, 20.0],
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "rope_theta": 1e6}
LINEAR: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "num_key_value_heads": 2,
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320,
    "final_logit_softcapping": 3.0,
}
GEMMA4_ASSISTANT: dict[str, Any] = {
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 64,
    "use_ordered_embeddings": False,
    "tie_word_embeddings": True,
    "text_config": {
        **GEMMA4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
    },
}
"""A drafter for `GEMMA4`."""
EVERY_OPERATION = ("llama-biased", "phi4-mini", "gemma2", "gemma3", "smollm3", "granite", "olmo2", "gemma4")
"""Architectures with attention that have every operation between them."""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama-2": {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False},
    "llama-biased": {**NEWER, "attention_bias": True, "mlp_bias": True},
    "smollm2": {"rope_theta": 1e5, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
    "mistral": {"model_type": "mistral", "rope_theta": 1e4, "sliding_window": WINDOW, "tie_word_embeddings": False},
    "mistral-0.3": {"model_type": "mistral", "rope_theta": 1e6, "sliding_window": None, "head_dim": 24},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6, "sliding_window": WINDOW, "use_sliding_window": False},
    "qwen2-sliding": {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
    },
    "qwen3": {"model_type": "qwen3", "rope_theta": 1e6, "head_dim": 32},
    "phi3": {"model_type": "phi3", "rope_theta": 1e4, "sliding_window": WINDOW, "tie_word_embeddings": False},
    "phi4-mini": {
        "model_type": "phi3",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 64,
    },
    "gemma2": {
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e4,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 24,
    },
    "gemma3-newer": {
        "model_type": "gemma3_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": False,
    },
    "smollm3": {
        "model_type": "smollm3",
        "rope_theta": 2e6,
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1, 1],
    },
    "granite": {
        "model_type": "granite",
        "rope_theta": 1e4,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.6,
        "logits_scaling": 5.0,
    },
    "granite4": {
        "model_type": "granitemoehybrid",
        "rope_theta": 1e4,
        "layer_types": ["attention"] * 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.6,
        "logits_scaling": 5.0,
    },
    "olmo2": {"model_type": "olmo2", "rope_theta": 5e5, "tie_word_embeddings": False},
    "olmo3": {
        "model_type": "olmo3",
        "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
    },
    "ministral3": {
        "model_type": "ministral3",
        "rope_parameters": YARN | {"original_max_position_embeddings": 128, **MSCALE},
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "mistral3": {
        "model_type": "mistral3",
        "text_config": {
            "model_type": "ministral3",
            "rope_parameters": YARN | {"original_max_position_embeddings": 128, **MSCALE},
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "head_dim": 8,
        },
    },
    "exaone4": {
        "model_type": "exaone4",
        "rope_theta": 1e6,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "num_hidden_layers": 3,
    },
    "gemma3-multimodal": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 24,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 224,
            "patch_size": 56,
        },
        "mm_tokens_per_image": 4,
    },
    "lfm2": {
        "model_type": "lfm2",
        "hidden_act": None,
        "rms_norm_eps": None,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2-adjusted": {
        "model_type": "lfm2",
        "hidden_act": None,
        "rms_norm_eps": None,
        "norm_eps": 1e-6,
        "num_hidden_layers": 3,
        "full_attn_idxs": [1],
        "intermediate_size": 48,
        "block_ff_dim": 300,
        "block_ffn_dim_multiplier": 0.7,
        "block_multiple_of": 32,
        "conv_L_cache": 4,
    },
    "lfm3": {
        "model_type": "lfm3",
        "hidden_act": None,
        "rms_norm_eps": None,
        "norm_eps": 1e-5,
        "num_hidden_layers": 6,
        "sliding_window": WINDOW,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        **LINEAR,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    },
    "qwen3_5-multimodal": {
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            **LINEAR,
            "num_hidden_layers": 4,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 1,
            "linear_value_head_dim": 32,
        },
        "vision_config": {
            "model_type": "qwen3_5_vision",
            "hidden_size": 16,
            "out_hidden_size": 64,
            "intermediate_size": 16,
            "depth": 1,
            "num_heads": 2,
            "num_position_embeddings": 16,
        },
    },
    "gemma4": GEMMA4,
    "gemma4-newer": {
        **GEMMA4,
        "global_head_dim": None,
        "per_layer_config": {"1": {"head_dim": 32}, "4": {"head_dim": 32, "num_key_value_heads": 1}},
        "num_kv_shared_layers": 0,
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
    },
    "gemma4-twelve": {
        **GEMMA4,
        "num_hidden_layers": 12,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
        "num_kv_shared_layers": 6,
    },
    "gemma4-multimodal": {"model_type": "gemma4", "text_config": GEMMA4, "vision_config": None, "audio_config": None},
    "gemma": {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 1, "head_dim": 32},
    "vaultgemma": {
        "model_type": "vaultgemma",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "exaone": {
        "model_type": "exaone",
        "num_hidden_layers": None,
        "num_layers": 2,
        "rms_norm_eps": None,
        "layer_norm_epsilon": 1e-5,
        "hidden_act": None,
        "activation_function": "silu",
        "rope_theta": 1e6,
        "rope_scaling": LLAMA3,
    },
    "ministral": {
        "model_type": "ministral",
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "head_dim": 32,
        "rope_theta": 1e8,
        "tie_word_embeddings": False,
    },
    "internlm3": {
        "model_type": "internlm3",
        "qkv_bias": True,
        "bias": True,
        "rope_parameters": {"rope_type": "linear", "factor": 6.0, "rope_theta": 5e7},
    },
    "seed_oss": {"model_type": "seed_oss", "attention_bias": True, "head_dim": 32, "rope_theta": 1e7},
    "hyperclovax": {
        "model_type": "hyperclovax",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.6,
        "logits_scaling": 0.2,
    },
    "iquestcoder": {"model_type": "iquestcoder", "rope_theta": 5e5, "tie_word_embeddings": False},
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        "text_config": {
            "model_type": "qwen2_vl_text",
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "rope_theta": 1e6,
        },
        "vision_config": {
            "model_type": "qwen2_vl_vision",
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 1,
        },
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [0],
        },
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": {
            "model_type": "qwen3_vl_text",
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
    "lfm2_vl": {
        "model_type": "lfm2_vl",
        "projector_hidden_size": 64,
        "text_config": {
            "model_type": "lfm2",
            "hidden_act": None,
            "rms_norm_eps": None,
            "norm_eps": 1e-5,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
        "vision_config": {
            "model_type": "siglip2_vision_model",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_patches": 16,
        },
    },
    "glm": {
        "model_type": "glm",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "glm4": {
        "model_type": "glm4",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "helium": {"model_type": "helium", "rope_theta": 2e4, "tie_word_embeddings": False},
    "ernie4_5": {"model_type": "ernie4_5", "rope_theta": 5e5, "head_dim": 32, "use_bias": True},
    "hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "rope_parameters": {
            "rope_type": "dynamic",
            "alpha": 1000.0,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
        },
    },
    "olmo": {"model_type": "olmo", "rms_norm_eps": None},
    "cohere": {"model_type": "cohere", "rms_norm_eps": None, "logit_scale": 0.3, "rope_theta": 1e4},
    "cohere2": {
        "model_type": "cohere2",
        "rms_norm_eps": None,
        "logit_scale": 0.25,
        "sliding_window": WINDOW,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_theta": 5e4,
    },
    "arcee": {
        "model_type": "arcee",
        "hidden_act": "relu2",
        "mlp_bias": True,
        "rope_parameters": YARN | {"rope_theta": 1e4},
        "tie_word_embeddings": False,
    },
    "starcoder2": {
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": None,
        "use_bias": True,
    },
    "stablelm": {
        "model_type": "stablelm",
        "rms_norm_eps": None,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": True,
        "tie_word_embeddings": False,
    },
    "stablelm-parallel": {"model_type": "stablelm", "rms_norm_eps": None, "use_parallel_residual": True},
    "phi": {"model_type": "phi", "hidden_act": "gelu_new", "rms_norm_eps": None, "tie_word_embeddings": False},
    "nemotron": {"model_type": "nemotron", "hidden_act": "relu2", "rms_norm_eps": None, "norm_eps": 1e-5},
    "jais2": {
        "model_type": "jais2",
        "hidden_act": "relu2",
        "rms_norm_eps": None,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "rms_norm_eps": None,
        "layer_norm_eps": 1e-5,
        "num_key_value_heads": None,
        "head_dim": None,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "tie_word_embeddings": False,
    },
    "gpt_neox-serial": {
        "model_type": "gpt_neox",
        "hidden_act": "gelu_new",
        "rms_norm_eps": None,
        "num_key_value_heads": None,
        "head_dim": None,
        "use_parallel_residual": False,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        "tie_word_embeddings": False,
    },
    "gptj": {
        "model_type": "gptj",
        **dict.fromkeys(("hidden_act", "rms_norm_eps", "num_key_value_heads", "head_dim", "intermediate_size")),
        **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")),
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "rotary_dim": 8,
        "activation_function": "gelu_new",
        "tie_word_embeddings": False,
    },
    "apertus": {"model_type": "apertus", "hidden_act": "xielu", "rope_theta": 1e6, "tie_word_embeddings": False},
    "cwm": {
        "model_type": "cwm",
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
    },
    "llama4": {
        "model_type": "llama4_text",
        "num_hidden_layers": 3,
        "intermediate_size_mlp": 96,
        "moe_layers": [],
        "no_rope_layers": [1, 0, 1],
        "attn_temperature_tuning": False,
        "attention_chunk_size": 192,
        "rope_theta": 5e5,
    },
    "nanochat": {
        "model_type": "nanochat",
        "hidden_act": "relu2",
        "final_logit_softcapping": 3.0,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    },
    "granitemoe": {
        "model_type": "granitemoe",
        "rope_theta": 1e4,
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.6,
        "logits_scaling": 5.0,
    },
    "granite4-h": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "nope",
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_d_head": 16,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.6,
        "logits_scaling": 5.0,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "hidden_act": None,
        "rms_norm_eps": None,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "full_attention", "conv"],
        "num_dense_layers": 1,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
    },
    "olmoe": {
        "model_type": "olmoe",
        "rope_theta": 1e4,
        "intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "rope_theta": 1e6,
        "num_hidden_layers": 3,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        "rope_theta": 1e6,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 24,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "attention_in_multiplier": 1.5,
        "attention_out_multiplier": 0.75,
        "key_multiplier": 0.4,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.5,
        "ssm_multipliers": [0.7, 0.5, 0.9, 1.1, 0.8],
        "mlp_multipliers": [0.9, 0.6],
        "tie_word_embeddings": False,
    },
    "falcon_h1-normed": {
        "model_type": "falcon_h1",
        "rope_theta": 1e6,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": "auto",
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "hidden_act": None,
        "mlp_hidden_act": "relu2",
        "rms_norm_eps": None,
        "layer_norm_epsilon": 1e-5,
        "rope_theta": None,
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 24,
        "tie_word_embeddings": False,
    },
    "mellum": {
        "model_type": "mellum",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "sliding_window": WINDOW,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
}
"""A configuration of each architecture, as differences from `CONFIG`; None removes a field."""

NORMS = ("input_layernorm", "post_attention_layernorm")
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
AFTER = ("olmo2", "olmo3", "exaone4")
"""Architectures whose norms stand behind the blocks only."""
GEMMA_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def config_of(*overrides: dict[str, Any]) -> dict[str, Any]:
    """The fields of config.json: those of `CONFIG`, or others; None removes a field."""
    config: dict[str, Any] = dict(CONFIG)
    for override in overrides:
        config.update(override)
    if "text_config" in config:
        inner = CONFIG | config["text_config"]
        beside = {
            name: config[name] for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
        }
        config = beside | {name: value for override in overrides for name, value in override.items()}
        config["text_config"] = inner
    # Mistral and Phi-3 tell null from absent; where there is a default of 4096, absent would be a window.
    return {name: value for name, value in config.items() if value is not None or name == "sliding_window"}


def write_checkpoint(
    folder: Path,
    *overrides: dict[str, Any],
    seed: int = 0,
    gain: float = 2.0,
    dtype: Any = ml_dtypes.bfloat16,
    shards: int = 1,
) -> Path:
    """Random weights; `overrides` of `CONFIG` go into config.json (None removes a field).

    Args:
        folder: to be made.
        overrides: differences from `CONFIG`.
        seed: of the weights.
        gain: how much a matrix amplifies; at 2, attention is as sharp as a trained model's, and rounding is amplified.
        dtype: of the stored weights.
        shards: more than 1 writes an index beside as many safetensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(*overrides or (NEWER,))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258], "bos_token_id": 256}))
    write_tokenizer(folder / "tokenizer.json")
    weights = {name: value.astype(dtype) for name, value in _weights(config, seed, gain).items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = list(weights)
    files = {
        name: f"model-{i * shards // len(names) + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)
    }
    for file in sorted(set(files.values())):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def width_of(config: dict[str, Any]) -> int:
    """The hidden size of a decoder, alone or beside an encoder."""
    text = config.get("text_config", config)
    return int(text["n_embd"] if "n_embd" in text else text["hidden_size"])


def as_float32(tensors: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a file in the type that transformers saves what it has loaded as float32 in."""
    return {name: np.array(value, np.float32, order="C") for name, value in tensors.items()}


def as_saved(folder: Path, record: dict[str, Any]) -> Path:
    """Turn a checkpoint into what transformers' `save_pretrained` writes of it; see tests/golden/saved.py."""
    weights = as_float32(load_file(folder / "model.safetensors"))
    for name, written in record["names"].items():
        weights[name] = weights.pop(written)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(record["config"]))
    if prepared := record.get("processor"):
        (folder / "preprocessor_config.json").unlink()
        for name, fields in prepared.items():
            (folder / name).write_text(json.dumps(fields))
    return folder


def write_tokenizer(path: Path, extra: int = 4, special: bool = True, adds_first: bool = False) -> None:
    """A tokenizer of the 256 bytes and `extra` more tokens, special or not; `adds_first`: of these, to each text."""
    tokenizer = byte_tokenizer()
    added = [AddedToken(f"<|{i}|>", special=special) for i in range(extra)]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    if adds_first:
        tokenizer.post_processor = processors.TemplateProcessing(single="<|0|> $A", special_tokens=[("<|0|>", 256)])
    tokenizer.save(str(path))


def _weights(config: dict[str, Any], seed: int, gain: float) -> dict[str, np.ndarray[Any, Any]]:
    """`random_weights`; those of a text model beside a vision model have the prefixes of the hub's two forms."""
    if "text_config" not in config:
        return random_weights(config, seed, gain)
    listed = config["text_config"]["model_type"] in _LISTED
    text = random_weights(config["text_config"], seed, gain) if listed else described_weights(config, seed, gain)
    if config["model_type"] == "gemma3":
        found = {f"language_model.{name}": value for name, value in text.items()}
        return found | {"vision_tower.vision_model.embeddings.patch_embedding.bias": np.zeros(16, np.float32)}
    found = {name.replace("model.", "model.language_model.", 1): value for name, value in text.items()}
    if config["model_type"] in ("qwen2_vl", "qwen2_5_vl"):
        return found | {"model.visual.norm.weight": np.ones(16, np.float32)}
    if config["model_type"] == "gemma4":
        return found | {"model.audio_tower.norm.weight": np.ones(16, np.float32)}
    return found | {"model.multi_modal_projector.norm.weight": np.ones(16, np.float32)}


_LISTED = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "smollm3", "granite", "olmo2", "olmo3",
    "ministral3", "exaone4",
)  # fmt: skip
"""Architectures whose tensors are listed here; those of others are what their descriptions say."""


def random_weights(config: dict[str, Any], seed: int, gain: float = 2.0) -> dict[str, np.ndarray[Any, Any]]:
    """float32 tensors that bfloat16 holds exactly, by the names that transformers gives them."""
    if config["model_type"] not in _LISTED:
        return described_weights(config, seed, gain)
    random = np.random.Generator(np.random.PCG64(seed))
    more = np.random.Generator(np.random.PCG64([seed, 1]))  # what Llama does not have
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    query = config["num_attention_heads"] * head_dim
    key_value = config.get("num_key_value_heads", config["num_attention_heads"]) * head_dim
    kind = config["model_type"]
    gemma = kind.startswith("gemma")

    def rounded(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)

    def matrix(out: int, width: int) -> np.ndarray[Any, Any]:
        return rounded(random.standard_normal((out, width)) * gain / np.sqrt(width))

    def norm(width: int = hidden, random: np.random.Generator = random) -> np.ndarray[Any, Any]:
        return rounded((0 if gemma else 1) + 0.1 * random.standard_normal(width))

    weights = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": norm()}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in POST_NORMS if kind in AFTER else NORMS:
            weights[f"{at}{name}.weight"] = norm()
        shapes = [(query, hidden), (key_value, hidden), (key_value, hidden), (hidden, query)]
        shapes += [(width, hidden), (width, hidden), (hidden, width)]
        matrices = {name: matrix(*shape) for name, shape in zip((*ATTENTION, *MLP), shapes, strict=True)}
        biased = ATTENTION[:3] if kind == "qwen2" else ATTENTION if config.get("attention_bias") else ()
        for name in (*biased, *(MLP if config.get("mlp_bias") else ())):
            weights[f"{at}{name}.bias"] = rounded(more.standard_normal(len(matrices[name])))
        for name in GEMMA_NORMS if gemma else ():
            weights[f"{at}{name}.weight"] = norm(random=more)
        if kind in ("qwen3", "gemma3_text", *AFTER):
            whole = kind.startswith("olmo")
            weights[f"{at}self_attn.q_norm.weight"] = norm(query if whole else head_dim, more)
            weights[f"{at}self_attn.k_norm.weight"] = norm(key_value if whole else head_dim, more)
        if kind == "phi3":
            fused = {"self_attn.qkv_proj": ATTENTION[:3], "mlp.gate_up_proj": MLP[:2]}
            for name, parts in fused.items():
                matrices[name] = np.concatenate([matrices.pop(part) for part in parts])
        weights |= {f"{at}{name}.weight": value for name, value in matrices.items()}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocab, hidden)
    return weights


def write_drafter(folder: Path, target: Path, *, seed: int = 7, gain: float = 1.0, **changes: Any) -> Path:
    """A drafter of random weights for a checkpoint; `changes` of its text_config, whose None removes a field."""
    config = {**GEMMA4_ASSISTANT, "text_config": CONFIG | GEMMA4_ASSISTANT["text_config"] | changes}
    text = config["text_config"] = {key: each for key, each in config["text_config"].items() if each is not None}
    spec = describe_drafter(Config(config), describe(Config(json.loads((target / "config.json").read_text()))))
    random = np.random.Generator(np.random.PCG64(seed))
    weights: dict[str, np.ndarray[Any, Any]] = {}
    for view in views(spec):
        shape, is_gain = view.stored_shape, "norm" in view.role or view.role == "layer_scalar"
        if view.name == TARGET_IN:
            shape = (text["hidden_size"], 2 * config["backbone_hidden_size"])
        scale = 0.1 if is_gain else gain / np.sqrt(shape[-1])
        values = scale * random.standard_normal(shape) + is_gain
        if view.role == "q_norm":
            values /= 4  # scores of noise would be too sharp
        layer = view.layer
        key = view.key if layer is None else view.key.replace(f".{layer}.", f".{layer - spec.first_layer}.")
        weights[key] = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    weights["model.embed_tokens.weight"] = weights.pop("lm_head.weight")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: each.astype(ml_dtypes.bfloat16) for key, each in weights.items()}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    return folder


def write_sinking(folder: Path, architecture: dict[str, Any]) -> Path:
    """A random model with a neuron in its first layer that only bos excites, and that writes a massive activation.

    Channel 0 of the residual is 0 for all other tokens until then.
    """
    bos = CONFIG["bos_token_id"]
    write_checkpoint(folder, {**architecture, "tie_word_embeddings": False})
    tensors = load_file(folder / "model.safetensors")
    embedding, at = tensors["model.embed_tokens.weight"], "model.layers.0."
    embedding[:, 0] = embedding[bos] = 0
    embedding[bos, 0] = 10
    tensors[at + "self_attn.o_proj.weight"][0] = 0
    for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
        tensors[at + name][0] = 0
        tensors[at + name][0, 0] = 100
    tensors[at + "mlp.down_proj.weight"][5, 0] = 0.5
    save_file(tensors, folder / "model.safetensors")
    return folder


if __name__ == "__main__":  # python -m tests.support.checkpoints FOLDER JSON: what CONTRIBUTING.md does
    write_checkpoint(Path(sys.argv[1]), json.loads(sys.argv[2]))


def add_head(folder: Path, *, seed: int = 9, gain: float = 1.0) -> Path:
    """Give a Qwen3.5 of random weights a random head for further tokens, in a second file, as large models have it."""
    config = json.loads((folder / "config.json").read_text())
    described = Config(config)
    spec = describe_drafter(described, describe(described))
    random = np.random.Generator(np.random.PCG64(seed))
    shapes = {
        "fc.weight": (spec.hidden, 2 * spec.hidden),
        "pre_fc_norm_embedding.weight": (spec.hidden,),
        "pre_fc_norm_hidden.weight": (spec.hidden,),
    }
    layers = ("model.layers.", "model.norm.")
    shapes |= {
        each.key.removeprefix("model."): each.stored_shape for each in views(spec) if each.name.startswith(layers)
    }
    weights = {
        f"mtp.{name}": (0.1 if len(shape) == 1 else gain / np.sqrt(shape[-1])) * random.standard_normal(shape)
        for name, shape in shapes.items()
    }
    save_file({name: each.astype(ml_dtypes.bfloat16) for name, each in weights.items()}, folder / "mtp.safetensors")
    files = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    files |= dict.fromkeys(weights, "mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder
