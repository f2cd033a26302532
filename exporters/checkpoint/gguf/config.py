"""From GGUF metadata to the fields of a Hugging Face `config.json`, so that one reader describes both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from edgekv.errors import CheckpointError
from exporters.checkpoint.gguf.file import GgufFile

Fields = dict[str, Any]

_LLAMA3 = (1.0, 4.0, 8192.0)  # low_freq_factor, high_freq_factor and original context of Llama 3.1 and 3.2
_ENDS = ("eos", "eot", "eom")  # of a text, a turn and a message
_GEMMA_LOCAL_THETA = 1e4  # llama.cpp's value; the files do not contain it
_BY_LAYER = ("gemma4",)  # architectures that describe sizes and rotary embeddings by layer
_NOT_ROTATED = 1e20


def hugging_face_config(file: GgufFile) -> Fields:
    """The fields of the `config.json` that this model had before it was converted.

    Raises:
        CheckpointError: the architecture is not supported, or a field is missing or contradictory.
    """
    describe = _ARCHITECTURES.get(file.architecture)
    if describe is None:
        raise CheckpointError(
            f"{file.path.name}: general.architecture",
            got=repr(file.architecture),
            expected=", ".join(_ARCHITECTURES),
            fix="This architecture cannot be exported.",
        )
    fields = _shared(file) | describe(file)
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (entry := f"tokenizer.ggml.{key}_token_id") in file:
            fields[name] = file.size(entry)
    ends = [file.size(entry) for key in _ENDS if (entry := f"tokenizer.ggml.{key}_token_id") in file]
    return fields | {"eos_token_id": list(dict.fromkeys(ends))}


def _shared(file: GgufFile) -> Fields:
    """The fields of all decoders: sizes, norm, rotary embedding, tied head."""
    by_layer = file.architecture in _BY_LAYER
    heads, hidden = file.size(".attention.head_count"), file.size(".embedding_length")
    head_dim = file.size(".attention.key_length", hidden // heads if heads else 0)
    value_dim = file.size(".attention.value_length", head_dim)
    if value_dim != head_dim:
        raise file.refusal(".attention.value_length", f"{head_dim}, the width of keys", value_dim)
    if "token_embd.weight" not in file.blocks:
        raise CheckpointError(
            f"{file.path.name}: token_embd.weight",
            got="no such tensor",
            expected="an embedding table",
            fix="Give the file of the whole model, not of an adapter or a projector.",
        )
    fields: Fields = {
        "hidden_size": hidden,
        "intermediate_size": 0 if by_layer else file.size(".feed_forward_length"),
        "num_hidden_layers": file.size(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": 0 if by_layer else file.size(".attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": file.blocks["token_embd.weight"].shape[0],
        "max_position_embeddings": file.size(".context_length"),
        "rms_norm_eps": file.number(".attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number(".rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.blocks,
    }
    return fields if by_layer else fields | _rope_scaling(file, head_dim)


def _rope_scaling(file: GgufFile, head_dim: int) -> Fields:
    """The scaling of the rotary embedding: named in the metadata, or as a tensor of factors."""
    width = file.size(".rope.dimension_count", head_dim)
    found: Fields = {} if width == head_dim else {"partial_rotary_factor": width / head_dim}
    if "rope_factors_long.weight" in file.blocks:
        long, short = (_factors(file, f"rope_factors_{each}.weight") for each in ("long", "short"))
        original = file.size(".rope.scaling.original_context_length")
        table: Fields = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        if ".rope.scaling.attn_factor" in file:
            table["attention_factor"] = file.number(".rope.scaling.attn_factor")
        return found | {"rope_scaling": table, "original_max_position_embeddings": original}
    if "rope_freqs.weight" in file.blocks:
        return found | {"rope_scaling": _llama3(file, width)}
    kind = file.text(".rope.scaling.type", "none")
    if kind == "none":
        return found
    if kind == "linear":
        return found | {"rope_scaling": {"rope_type": "linear", "factor": file.number(".rope.scaling.factor")}}
    if kind == "yarn":
        table = {
            "rope_type": "yarn",
            "factor": file.number(".rope.scaling.factor"),
            "original_max_position_embeddings": file.size(".rope.scaling.original_context_length"),
        }
        return found | {"rope_scaling": table}
    raise file.refusal(".rope.scaling.type", "none, linear, yarn or factors stored as a tensor", kind)


def _llama3(file: GgufFile, width: int) -> Fields:
    """Llama 3's scaling. The files store divisors of the frequencies; the largest is the factor.

    Raises:
        CheckpointError: they are not those of Llama 3.1 and 3.2.
    """
    stored = np.asarray(_factors(file, "rope_freqs.weight"))
    low, high, original = _LLAMA3
    factor = float(stored.max())
    plain = file.number(".rope.freq_base") ** (-np.arange(0, width, 2) / width)
    kept = np.clip((original * plain / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
    if stored.shape != plain.shape or not np.allclose(1 / stored, kept + (1 - kept) / factor, rtol=1e-3):
        raise file.refusal("rope_freqs.weight", "the factors of Llama 3's rope scaling", stored.tolist())
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": int(original),
    }


def _factors(file: GgufFile, name: str) -> list[float]:
    block = file.blocks.get(name)
    if block is None or block.type != "F32" or len(block.shape) != 1:
        raise file.refusal(name, "a list of F32 factors", None if block is None else block.type)
    return [float(each) for each in block.data]


def _llama(file: GgufFile) -> Fields:
    biased = "blk.0.attn_q.bias" in file.blocks
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": biased,
        "mlp_bias": "blk.0.ffn_up.bias" in file.blocks,
    }


def _qwen2(file: GgufFile) -> Fields:
    return {"model_type": "qwen2", "hidden_act": "silu"}


def _qwen3(file: GgufFile) -> Fields:
    return {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": "blk.0.attn_q.bias" in file.blocks}


def _phi3(file: GgufFile) -> Fields:
    window = file.size(".attention.sliding_window", 0)
    # llama.cpp writes a window into every Phi-3 file; Phi-4-mini's equals its context and limits nothing.
    limits = window and window < file.size(".context_length")
    return {"model_type": "phi3", "hidden_act": "silu", "sliding_window": window if limits else None}


def _gemma(file: GgufFile) -> Fields:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma_scalar(file),
        "sliding_window": file.size(".attention.sliding_window"),
    }


def _gemma_scalar(file: GgufFile) -> float:
    """The query scale is not in the file: as in llama.cpp, it follows from the number of layers."""
    widest = {"gemma2": 46, "gemma3": 62}[file.architecture]  # layers of the 27B models
    heads, hidden = file.size(".attention.head_count"), file.size(".embedding_length")
    if file.size(".block_count") == widest:
        return hidden / heads
    return float(file.size(".attention.key_length"))


def _gemma2(file: GgufFile) -> Fields:
    return _gemma(file) | {
        "model_type": "gemma2",
        "attn_logit_softcapping": file.number(".attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number(".final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile) -> Fields:
    return _gemma(file) | {
        "model_type": "gemma3_text",
        "rope_local_base_freq": file.number(".rope.freq_base_swa", _GEMMA_LOCAL_THETA),
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    }


def _gemma4(file: GgufFile) -> Fields:
    layers, full_dim = file.size(".block_count"), file.size(".attention.key_length")
    slides = file.sizes(".attention.sliding_window_pattern", layers)
    head_dims = [file.size(".attention.key_length_swa") if each else full_dim for each in slides]
    key_heads, widths = (file.sizes(each, layers) for each in (".attention.head_count_kv", ".feed_forward_length"))
    return {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "sliding_window": file.size(".attention.sliding_window"),
        "head_dim": min(head_dims),
        "num_key_value_heads": key_heads[0],
        "per_layer_config": {
            str(layer): {"head_dim": dim, "num_key_value_heads": count}
            for layer, (dim, count) in enumerate(zip(head_dims, key_heads, strict=True))
        },
        "intermediate_size": min(widths),
        "use_double_wide_mlp": min(widths) < max(widths),
        "num_kv_shared_layers": file.size(".attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": file.size(".embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": file.blocks["token_embd.weight"].shape[0],
        "final_logit_softcapping": file.number(".final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": file.number(".rope.freq_base", 1e6),
                "partial_rotary_factor": _rotated(file),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.number(".rope.freq_base_swa", _GEMMA_LOCAL_THETA),
            },
        },
    }


def _rotated(file: GgufFile) -> float:
    """How much of a head is rotated in layers with full attention: the divisors of all other frequencies are huge.

    Raises:
        CheckpointError: they are others than 1 and huge ones after them.
    """
    name = "rope_freqs.weight"
    found = np.asarray(_factors(file, name))
    count = int((found == 1).sum())
    if not 0 < count == int((found[:count] == 1).sum()) or (found[count:] < _NOT_ROTATED).any():
        raise file.refusal(name, f"ones, and numbers of at least {_NOT_ROTATED:g} after them", found.tolist())
    return count / len(found)


def _smollm3(file: GgufFile) -> Fields:
    layers = file.size(".block_count")
    return {
        "model_type": "smollm3",
        "hidden_act": "silu",
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)],
    }


def _granite(file: GgufFile) -> Fields:
    return _llama(file) | {
        "model_type": "granite",
        "embedding_multiplier": file.number(".embedding_scale"),
        "residual_multiplier": file.number(".residual_scale"),
        "attention_multiplier": file.number(".attention.scale"),
        "logits_scaling": file.number(".logit_scale"),
    }


def _lfm2(file: GgufFile) -> Fields:
    heads = file.list(".attention.head_count_kv") or [1]
    return {
        "model_type": "lfm2",
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "conv_L_cache": file.size(".shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,  # the file has the width itself
    }


def _olmo2(file: GgufFile) -> Fields:
    return {"model_type": "olmo2", "hidden_act": "silu", "attention_bias": False}


def _qwen35(file: GgufFile) -> Fields:
    values = file.size(".ssm.time_step_rank")
    return {
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "num_hidden_layers": file.size(".block_count") - further_layers(file),
        "full_attention_interval": file.size(".full_attention_interval", 4),
        "linear_conv_kernel_dim": file.size(".ssm.conv_kernel"),
        "linear_num_key_heads": file.size(".ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": file.size(".ssm.state_size"),
        "linear_value_head_dim": file.size(".ssm.inner_size") // values,
    }


def further_layers(file: GgufFile) -> int:
    """Layers behind the decoder's, which predict further tokens."""
    name = ".nextn_predict_layers"
    return file.size(name) if name in file else 0


_ARCHITECTURES: Mapping[str, Callable[[GgufFile], Fields]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "granite": _granite,
    "lfm2": _lfm2,
    "llama": _llama,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen35": _qwen35,
    "smollm3": _smollm3,
}
