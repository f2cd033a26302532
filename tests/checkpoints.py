"""Small random checkpoints in Hugging Face layout, the same on every machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

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


def write_checkpoint(folder: Path, *overrides: dict[str, Any], seed: int = 0) -> Path:
    """A Llama with random bf16 weights; `overrides` of `CONFIG` go into config.json (None removes a field)."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = dict(CONFIG)
    for override in overrides or (NEWER,):
        config.update(override)
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258], "bos_token_id": 256}))
    write_tokenizer(folder / "tokenizer.json")
    save_file(random_weights(config, seed), folder / "model.safetensors")
    return folder


def write_tokenizer(path: Path, extra: int = 4) -> None:
    """A tokenizer of the 256 bytes and `extra` special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{i}|>", special=True) for i in range(extra)])
    tokenizer.save(str(path))


def random_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.Generator(np.random.PCG64(seed))
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key_value = config["num_key_value_heads"] * config["head_dim"]

    def matrix(out: int, width: int) -> np.ndarray[Any, Any]:
        return (random.standard_normal((out, width)) * 2 / np.sqrt(width)).astype(ml_dtypes.bfloat16)

    def norm() -> np.ndarray[Any, Any]:
        return (1 + 0.1 * random.standard_normal(hidden)).astype(ml_dtypes.bfloat16)

    weights = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": norm()}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = norm()
        weights[at + "post_attention_layernorm.weight"] = norm()
        weights[at + "self_attn.q_proj.weight"] = matrix(query, hidden)
        weights[at + "self_attn.k_proj.weight"] = matrix(key_value, hidden)
        weights[at + "self_attn.v_proj.weight"] = matrix(key_value, hidden)
        weights[at + "self_attn.o_proj.weight"] = matrix(hidden, query)
        weights[at + "mlp.gate_proj.weight"] = matrix(width, hidden)
        weights[at + "mlp.up_proj.weight"] = matrix(width, hidden)
        weights[at + "mlp.down_proj.weight"] = matrix(hidden, width)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocab, hidden)
    return weights
