"""GGUF files of small checkpoints, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
}
TABLES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
DELTA_RULE = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
GEMMA4 = POST_NORMS | {
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
ARCHITECTURES = {"gemma3_text": "gemma3", "gemma4_text": "gemma4", "qwen3_5_text": "qwen35", "olmo3": "olmo2"}
INTERLEAVED = ("llama", "granite", "smollm3")
SLIDING = "sliding_attention"
WINDOWED = ("gemma2", "gemma3", "gemma4", "olmo2", "phi3")
PRE_TOKENIZERS = {  # of the tokenizers of published models
    "llama": "llama-bpe",
    "smollm3": "smaug-bpe",
    "granite": "refact",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "qwen35": "qwen35",
    "lfm2": "lfm2",
    "olmo2": "dbrx",
    "phi3": "gpt-4o",
}


def write_gguf(
    checkpoint: Path,
    path: Path,
    kind: str = "F32",
    tensors: int = 0,
    extra: Mapping[str, np.ndarray] = MappingProxyType({}),
    **changes: Any,
) -> Path:
    """Write the checkpoint in a folder as a GGUF file, its matrices in one type.

    Args:
        checkpoint: a Hugging Face folder.
        path: the file.
        kind: llama.cpp's name of the matrices' type.
        tensors: of each part, for a split file; 0 for a whole one.
        extra: further tensors.
        changes: metadata to replace; None leaves a field out.

    Returns:
        The file, or the first part.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors)
    fields = {key.format(arch=architecture): value for key, value in metadata(config, architecture).items()}
    for key, value in (fields | tokenizer_fields(checkpoint, config, architecture) | changes).items():
        if value is not None:
            _add(writer, key, value)
    for shard in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(shard, "numpy") as file:
            for key in file.keys():  # noqa: SIM118  (not a dict)
                values = file.get_tensor(key).astype(np.float32)
                name, values = converted(key, values, config, architecture)
                is_matrix = values.ndim == 2 and "conv" not in name.replace("shortconv.in", "").replace(
                    "shortconv.out", ""
                )
                kept = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
                writer.add_tensor(name, quantize(values, kept), raw_dtype=kept)
    if architecture == "gemma4":
        half = config["global_head_dim"] // 2
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * (half // 4) + [1e30] * (half - half // 4), np.float32))
    for name, values in extra.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if tensors else path


def sentence_piece(kind: str) -> Tokenizer:
    """A BPE with byte fallback, trained here, as Llama 2's is made; Gemma 4's puts no space before a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces, strip = normalizers.Replace(" ", "\u2581"), decoders.Strip(" ", 1, 0)
    has_prefix = kind == "llama"
    tokenizer.normalizer = normalizers.Sequence([*([normalizers.Prepend("\u2581")] if has_prefix else []), spaces])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([strip] if has_prefix else [])])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    text = [Path(__file__).read_text(), Path(gguf.__file__).with_name("utility.py").read_text()]
    tokenizer.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    )
    return tokenizer


def metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    fields = {
        "{arch}.block_count": config["num_hidden_layers"],
        "{arch}.context_length": config["max_position_embeddings"],
        "{arch}.embedding_length": config["hidden_size"],
        "{arch}.feed_forward_length": config["intermediate_size"],
        "{arch}.attention.head_count": heads,
        "{arch}.attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "{arch}.attention.key_length": head_dim,
        "{arch}.attention.value_length": head_dim,
        "{arch}.attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps") or config["norm_eps"]),
        "{arch}.rope.freq_base": float(config.get("rope_theta", 1e4)),
        "{arch}.rope.dimension_count": int(head_dim * config.get("partial_rotary_factor", 1)),
    }
    if architecture in WINDOWED and config.get("sliding_window") is not None:
        fields["{arch}.attention.sliding_window"] = config["sliding_window"]
    if config["model_type"] == "olmo3":
        fields["{arch}.attention.sliding_window_pattern"] = [each == SLIDING for each in config["layer_types"]]
    rope = config.get("rope_parameters", {})
    if (full := rope.get("full_attention", rope)) and architecture != "gemma4":
        fields |= scaling(full)
    if architecture == "gemma2":
        fields["{arch}.attn_logit_softcapping"] = config["attn_logit_softcapping"]
        fields["{arch}.final_logit_softcapping"] = config["final_logit_softcapping"]
    if architecture == "gemma4":
        fields |= gemma4_metadata(config)
    if architecture == "lfm2":
        kinds = config["layer_types"]
        fields["{arch}.attention.head_count_kv"] = [config["num_key_value_heads"] * (kind != "conv") for kind in kinds]
        fields["{arch}.shortconv.l_cache"] = config.get("conv_L_cache", 3)
        for width in ("key_length", "value_length"):
            del fields[f"{{arch}}.attention.{width}"]
    if architecture == "qwen35":
        rope, heads = config["rope_parameters"], config["linear_num_value_heads"]
        fields["{arch}.rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
        fields["{arch}.ssm.conv_kernel"] = 4
        fields["{arch}.ssm.group_count"] = config["linear_num_key_heads"]
        fields["{arch}.ssm.time_step_rank"] = heads
        fields["{arch}.ssm.state_size"] = config["linear_key_head_dim"]
        fields["{arch}.ssm.inner_size"] = heads * config["linear_value_head_dim"]
        fields["{arch}.full_attention_interval"] = 4
        fields["{arch}.rope.dimension_sections"] = [*rope["mrope_section"], 0]
        fields["{arch}.attention.recurrent_layers"] = [each == "linear_attention" for each in config["layer_types"]]
    if architecture == "granite":
        fields["{arch}.embedding_scale"] = config["embedding_multiplier"]
        fields["{arch}.residual_scale"] = config["residual_multiplier"]
        fields["{arch}.attention.scale"] = config["attention_multiplier"]
        fields["{arch}.logit_scale"] = config["logits_scaling"]
    return fields


def scaling(rope: dict[str, Any]) -> dict[str, Any]:
    """What the converter writes of the rope parameters of layers with full attention."""
    fields: dict[str, Any] = {"{arch}.rope.freq_base": float(rope["rope_theta"])}
    if rope["rope_type"] in ("linear", "yarn"):
        fields["{arch}.rope.scaling.type"] = rope["rope_type"]
        fields["{arch}.rope.scaling.factor"] = rope["factor"]
    if rope["rope_type"] == "yarn":
        fields["{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        names = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        fields |= {f"{{arch}}.rope.scaling.{name}": rope.get(key) for key, name in names.items()}
    return fields


def gemma4_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """What differs between two kinds of layers, and those that share a cache."""
    layers, sharing, width = (
        config[each] for each in ("num_hidden_layers", "num_kv_shared_layers", "intermediate_size")
    )
    dims = {"": config["global_head_dim"], "_swa": config["head_dim"]}
    fields: dict[str, Any] = {f"{{arch}}.rope.dimension_count{kind}": dim for kind, dim in dims.items()}
    for name in ("key_length", "value_length"):
        fields |= {f"{{arch}}.attention.{name}{kind}": dim for kind, dim in dims.items()}
    return fields | {
        "{arch}.rope.freq_base": 1e6,
        "{arch}.rope.freq_base_swa": 1e4,
        "{arch}.feed_forward_length": [width * (1 + (layer >= layers - sharing)) for layer in range(layers)],
        "{arch}.attention.sliding_window_pattern": [each == SLIDING for each in config["layer_types"]],
        "{arch}.attention.shared_kv_layers": sharing,
        "{arch}.embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "{arch}.final_logit_softcapping": config["final_logit_softcapping"],
    }


def tokenizer_fields(checkpoint: Path, config: dict[str, Any], architecture: str) -> dict[str, Any]:
    described = json.loads((checkpoint / "tokenizer.json").read_text())
    added = {each["id"]: each for each in described["added_tokens"]}
    vocabulary = described["model"]["vocab"] | {each["content"]: number for number, each in added.items()}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
    unused = [f"[PAD{number}]" for number in range(len(tokens), config["vocab_size"])]
    kinds = [3 if number in added else 1 for number in range(len(tokens))] + [5] * len(unused)
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRE_TOKENIZERS.get(architecture, "gpt-2"),
        "tokenizer.ggml.tokens": tokens + unused,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges or None,
        "tokenizer.ggml.add_bos_token": described["post_processor"] is not None,
    }
    generation = checkpoint / "generation_config.json"
    given = config | (json.loads(generation.read_text()) if generation.exists() else {})
    ends = given["eos_token_id"] if isinstance(given["eos_token_id"], list) else [given["eos_token_id"]]
    fields |= dict(zip(("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"), ends, strict=False))
    return fields | {"tokenizer.ggml.bos_token_id": given.get("bos_token_id")}


def converted(key: str, values: np.ndarray, config: dict[str, Any], architecture: str) -> tuple[str, np.ndarray]:
    """What the converter makes of a tensor: its name, rotary pairs of some architectures, and norms with offset."""
    if architecture.startswith(("gemma2", "gemma3", "qwen35")) and "norm" in key and "linear_attn" not in key:
        values = values + 1
    if ".linear_attn." in key:
        values = tiled(key, values, config)
    if key.endswith("A_log"):
        return f"blk.{key.split('.')[2]}.ssm_a", -np.exp(values)
    if key.endswith("dt_bias"):
        return f"blk.{key.split('.')[2]}.ssm_dt.bias", values
    if key.endswith("conv1d.weight"):
        values = values[:, 0]
    if key.startswith("model.embedding_norm"):
        return "token_embd_norm.weight", values
    if key.endswith("conv.conv.weight"):
        values = values[:, 0]
    if key.endswith("layer_scalar"):
        return f"blk.{key.split('.')[2]}.layer_output_scale.weight", values
    if (table := TABLES.get(key.removesuffix(".weight"))) is not None:
        return f"{table}.weight", values
    _, _, layer, rest = key.split(".", 3)
    part, suffix = rest.rsplit(".", 1)
    names = NAMES | (POST_NORMS if architecture in ("gemma2", "gemma3", "olmo2") else {})
    names |= {"qwen35": DELTA_RULE, "gemma4": GEMMA4}.get(architecture, {})
    if architecture in INTERLEAVED and part in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config["num_attention_heads"]
        heads = heads if part == "self_attn.q_proj" else config.get("num_key_value_heads") or heads
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    return f"blk.{layer}.{names[part]}.{suffix}", values


def tiled(key: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """With the value heads in the order of llama.cpp: the first ones of all key heads, then the second ones."""
    if "norm" in key:
        return values
    if "out_proj" in key:
        return tiled(key.replace("out_proj", "in_proj_z"), values.T, config).T
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    first = 2 * keys * config["linear_key_head_dim"] if "qkv" in key or "conv1d" in key else 0
    by_key = values[first:].reshape(keys, heads // keys, -1, *values.shape[1:]).swapaxes(0, 1)
    return np.concatenate([values[:first], by_key.reshape(-1, *values.shape[1:])])


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
