"""From GGUF metadata to the fields of a Hugging Face `config.json`, so that one reader describes both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from edgekv.errors import CheckpointError
from exporters.checkpoint.gguf.file import GgufFile
from exporters.checkpoint.gguf.rope import FREQUENCIES, factors, rope_parameters
from exporters.checkpoint.gguf.special import special_ids

Fields = dict[str, Any]

_GEMMA_LOCAL_THETA = 1e4  # llama.cpp's value; older files do not contain it
_GEMMA2_WINDOW = 4096
_BY_LAYER = ("gemma4",)  # architectures that describe sizes and rotary embeddings by layer
_NOT_ROTATED = 1e20
_WITH_STATES = ("granitehybrid", "lfm2", "lfm2moe", "nemotron_h")
"""Architectures in which the layers without attention have 0 heads of keys."""
_TAKES_MEAN = {  # architectures with LayerNorm, and the field of its epsilon; none if that is always the same
    **dict.fromkeys(("command-r", "cohere2", "gptneox", "jais2", "phi2", "stablelm"), "layer_norm_eps"),
    "nemotron": "norm_eps",
    "olmo": "",
    "starcoder2": "norm_epsilon",
}
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_ROUTERS = ("none", "softmax", "sigmoid")  # what llama.cpp's numbers of them mean


def hugging_face_config(file: GgufFile) -> Fields:
    """The fields of the `config.json` that this model had before it was converted.

    Raises:
        CheckpointError: the architecture is not supported, or a field is missing or contradictory.
    """
    if (kind := file.text("general.type", "model")) != "model":
        raise file.refusal("general.type", "'model'", kind)
    describe = _ARCHITECTURES.get(file.architecture)
    if describe is None:
        raise CheckpointError(
            f"{file.path.name}: general.architecture",
            got=repr(file.architecture),
            expected=", ".join(_ARCHITECTURES),
            fix="This architecture cannot be exported.",
        )
    shared = _shared(file)
    key, rows = "tokenizer.ggml.tokens", shared["vocab_size"]
    if (tokens := len(file.texts(key))) != rows:
        raise file.refusal(key, f"{rows} tokens, as many as token_embd.weight has rows", tokens)
    special = special_ids(file)
    return (
        shared
        | describe(file)
        | {"bos_token_id": special.bos, "eos_token_id": list(special.ends), "pad_token_id": special.pad}
    )


def _shared(file: GgufFile) -> Fields:
    """The fields of all decoders: sizes, norm, rotary embedding, tied head."""
    by_layer = file.architecture in _BY_LAYER
    layers, hidden = file.size(".block_count"), file.size(".embedding_length")
    heads = file.shared_size(".attention.head_count", layers)
    head_dim = file.size(".attention.key_length", hidden // heads)
    _expect(file, ".attention.value_length", head_dim)
    if "token_embd.weight" not in file.blocks:
        raise CheckpointError(
            f"{file.path.name}: token_embd.weight",
            got="no such tensor",
            expected="an embedding table",
            fix="Give the file of the whole model, not of an adapter or a projector.",
        )
    fields: Fields = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "vocab_size": file.blocks["token_embd.weight"].shape[0],
        "max_position_embeddings": file.size(".context_length"),
        **_epsilon(file),
        "tie_word_embeddings": "output.weight" not in file.blocks,
    }
    if by_layer:
        return fields
    _expect(file, ".attention.key_length_swa", head_dim)
    _expect(file, ".attention.value_length_swa", head_dim)
    _expect(file, ".rope.dimension_count_swa", file.size(".rope.dimension_count", head_dim))
    return fields | {
        "intermediate_size": _feed_forward(file, layers),
        "num_key_value_heads": _key_heads(file, layers, heads),
        "rope_parameters": rope_parameters(file, head_dim),
    }


def _epsilon(file: GgufFile) -> Fields:
    """The epsilon of norms, under the name that the architecture's configuration has; some files have that of both."""
    key = ".attention.layer_norm_rms_epsilon"
    if (name := _TAKES_MEAN.get(file.architecture)) is None:
        return {"rms_norm_eps": file.number(key)}
    epsilon = file.number(".attention.layer_norm_epsilon")
    if (other := file.number(key, epsilon)) != epsilon:
        raise file.refusal(key, f"{epsilon:g}, as attention.layer_norm_epsilon says", other)
    return {name: epsilon} if name else {}


def _feed_forward(file: GgufFile, layers: int) -> int:
    """Width of the feed-forward; the layers of Nemotron-H without one have a 0."""
    if file.architecture != "nemotron_h":
        return file.shared_size(".feed_forward_length", layers)
    key = ".feed_forward_length"
    if len(widths := {*file.sizes(key, layers, least=0)} - {0}) != 1:
        raise file.refusal(key, "the same number above 0 for all layers with a feed-forward", sorted(widths))
    return widths.pop()


def _key_heads(file: GgufFile, layers: int, heads: int) -> int:
    """Heads of keys in the layers with attention; the others have a 0."""
    key = ".attention.head_count_kv"
    counts = {
        count for count in file.sizes(key, layers, heads, least=0) if count or file.architecture not in _WITH_STATES
    }
    if len(counts) != 1 or 0 in counts:
        raise file.refusal(key, "the same number above 0 for all layers with attention", sorted(counts))
    return counts.pop()


def _expect(file: GgufFile, key: str, expected: int) -> None:
    """Refuse a size that is another one than `expected`."""
    if (size := file.size(key, expected)) != expected:
        raise file.refusal(key, f"{expected}", size)


def _window(file: GgufFile) -> int | None:
    """The attention window; None if there is none, or if it is no smaller than the context."""
    window = file.size(".attention.sliding_window", 0, least=0)
    return window if 0 < window < file.size(".context_length") else None


def _without_window(file: GgufFile) -> None:
    """Refuse a window in an architecture whose layers all see the whole context."""
    if (window := _window(file)) is not None:
        raise file.refusal(".attention.sliding_window", f"none for the architecture {file.architecture}", window)
    key = ".attention.sliding_window_pattern"  # without a window it chooses nothing
    if file.flags(key, file.size(".block_count")) is None:
        file.size(key, 0, least=0)


def _layer_types(file: GgufFile, interval: int) -> list[str]:
    """The kind of each layer: by a list, or full attention at the end of each group of so many layers.

    Args:
        file: the file; an interval of 0 in it stands for windows in all layers.
        interval: the architecture's default.
    """
    key, layers = ".attention.sliding_window_pattern", file.size(".block_count")
    slides = file.flags(key, layers)
    if slides is None:
        interval = file.size(key, interval, least=0)
        slides = [interval == 0 or (layer + 1) % interval != 0 for layer in range(layers)]
    return [_SLIDING if is_sliding else _FULL for is_sliding in slides]


def _llama(file: GgufFile) -> Fields:
    _without_window(file)
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.blocks,
        "mlp_bias": "blk.0.ffn_up.bias" in file.blocks,
    }


def _qwen2(file: GgufFile) -> Fields:
    _without_window(file)
    return {"model_type": "qwen2", "hidden_act": "silu"}


def _qwen3(file: GgufFile) -> Fields:
    _without_window(file)
    return {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": "blk.0.attn_q.bias" in file.blocks}


def _phi3(file: GgufFile) -> Fields:
    """llama.cpp writes a window into every Phi-3 file; Phi-4-mini's equals its context and limits nothing."""
    return {"model_type": "phi3", "hidden_act": "silu", "sliding_window": _window(file)}


def _gemma_scalar(file: GgufFile) -> float:
    """The query scale is not in the file: as in llama.cpp, it follows from the number of layers."""
    widest = {"gemma2": 46, "gemma3": 62}[file.architecture]  # layers of the 27B models
    layers, hidden = file.size(".block_count"), file.size(".embedding_length")
    heads = file.shared_size(".attention.head_count", layers)
    if layers == widest:
        return hidden / heads
    return float(file.size(".attention.key_length", hidden // heads))


def _gemma2(file: GgufFile) -> Fields:
    theta = file.number(".rope.freq_base", 10000.0)
    if (local := file.number(".rope.freq_base_swa", theta)) != theta:
        raise file.refusal(".rope.freq_base_swa", f"{theta:g}, as rope.freq_base says", local)
    return {
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma_scalar(file),
        "sliding_window": file.size(".attention.sliding_window", _GEMMA2_WINDOW),
        "layer_types": _layer_types(file, 2),
        "attn_logit_softcapping": file.number(".attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number(".final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile) -> Fields:
    fields: Fields = {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma_scalar(file),
        "final_logit_softcapping": file.number(".final_logit_softcapping", 0.0) or None,
    }
    return fields | _local(file, interval=6, theta=_GEMMA_LOCAL_THETA)


def _local(file: GgufFile, interval: int, theta: float) -> Fields:
    """The fields of layers with a window, which have a rotary embedding of their own, without scaling."""
    theta = file.number(".rope.freq_base_swa", theta)
    types = _layer_types(file, interval)
    window = file.size(".attention.sliding_window", 0, least=0)
    full = rope_parameters(file, file.size(".attention.key_length", _default_head_dim(file)))
    return {
        "sliding_window": window or None,
        "layer_types": types if window else [_FULL] * len(types),
        "rope_parameters": {_FULL: full, _SLIDING: {"rope_type": "default", "rope_theta": theta}},
    }


def _default_head_dim(file: GgufFile) -> int:
    heads = file.shared_size(".attention.head_count", file.size(".block_count"))
    return file.size(".embedding_length") // heads


def _gemma4(file: GgufFile) -> Fields:
    layers, full_dim = file.size(".block_count"), file.size(".attention.key_length")
    local_dim = file.size(".attention.key_length_swa")
    _expect(file, ".attention.value_length_swa", local_dim)
    _expect(file, ".rope.dimension_count", full_dim)
    _expect(file, ".rope.dimension_count_swa", local_dim)
    key = ".attention.sliding_window_pattern"
    slides = file.flags(key, layers)
    if slides is None:
        raise file.refusal(key, f"true or false for each of {layers} layers", None)
    head_dims = [local_dim if is_sliding else full_dim for is_sliding in slides]
    key_heads, widths = (file.sizes(field, layers) for field in (".attention.head_count_kv", ".feed_forward_length"))
    sharing = file.size(".attention.shared_kv_layers", 0, least=0)
    is_wide = min(widths) < max(widths)
    expected_widths = [min(widths) * (1 + (is_wide and layer >= layers - sharing)) for layer in range(layers)]
    if widths != expected_widths:
        raise file.refusal(".feed_forward_length", "one width, or twice as much in layers that share a cache", widths)
    return {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [_SLIDING if is_sliding else _FULL for is_sliding in slides],
        "sliding_window": file.size(".attention.sliding_window"),
        "head_dim": min(head_dims),
        "num_key_value_heads": key_heads[0],
        "per_layer_config": {
            str(layer): {"head_dim": dim, "num_key_value_heads": count}
            for layer, (dim, count) in enumerate(zip(head_dims, key_heads, strict=True))
        },
        "intermediate_size": min(widths),
        "use_double_wide_mlp": is_wide,
        "num_kv_shared_layers": sharing,
        "hidden_size_per_layer_input": file.size(".embedding_length_per_layer_input", 0, least=0),
        "vocab_size_per_layer_input": file.blocks["token_embd.weight"].shape[0],
        "final_logit_softcapping": file.number(".final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional",
                "rope_theta": file.number(".rope.freq_base", 10000.0),
                "partial_rotary_factor": _rotated(file),
            },
            _SLIDING: {
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
    divisors = np.asarray(factors(file, FREQUENCIES))
    count = int((divisors == 1).sum())
    if not 0 < count == int((divisors[:count] == 1).sum()) or not (divisors[count:] >= _NOT_ROTATED).all():
        raise file.refusal(FREQUENCIES, f"ones, and numbers of at least {_NOT_ROTATED:g} after them", divisors.tolist())
    return count / len(divisors)


def _smollm3(file: GgufFile) -> Fields:
    """The layers without rotary embedding are not in the file: as in llama.cpp, every fourth."""
    fields = _llama(file) | {"model_type": "smollm3"}
    return fields | {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(file.size(".block_count"))]}


def _granite(file: GgufFile) -> Fields:
    """Multipliers of 0 are those that llama.cpp leaves out."""
    if not file.flag(".rope.scaling.finetuned", True):
        raise file.refusal(".rope.scaling.finetuned", "true: false stands for no rotary embedding", False)
    head_dim = file.size(".attention.key_length", _default_head_dim(file))
    return _llama(file) | {
        "model_type": "granite",
        "embedding_multiplier": file.number(".embedding_scale", 0.0) or 1.0,
        "residual_multiplier": file.number(".residual_scale", 0.0) or 1.0,
        "attention_multiplier": file.number(".attention.scale", 0.0) or head_dim**-0.5,
        "logits_scaling": file.number(".logit_scale"),
    }


def _mamba2(file: GgufFile) -> Fields:
    """The sizes of Mamba-2, under the names that Bamba's configuration has."""
    heads, width = file.size(".ssm.time_step_rank"), file.size(".ssm.inner_size")
    if width % heads:
        raise file.refusal(".ssm.inner_size", f"a multiple of ssm.time_step_rank, {heads}", width)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": width // heads,
        "mamba_n_groups": file.size(".ssm.group_count"),
        "mamba_d_state": file.size(".ssm.state_size"),
        "mamba_d_conv": file.size(".ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.blocks),
    }


def _granite_hybrid(file: GgufFile) -> Fields:
    """Granite 4 H. Bamba's files have the same architecture, and a rotary embedding that llama.cpp's order breaks."""
    if file.flag(".rope.scaling.finetuned", True):
        raise file.refusal(".rope.scaling.finetuned", "false: true stands for Bamba; take its safetensors", True)
    file.size(".rope.dimension_count", 0, least=0)
    _without_window(file)
    layers, hidden = file.size(".block_count"), file.size(".embedding_length")
    sizes, width, key = _mamba2(file), file.size(".feed_forward_length"), ".expert_shared_feed_forward_length"
    if (inner := file.size(".ssm.inner_size")) % hidden:
        raise file.refusal(".ssm.inner_size", f"a multiple of embedding_length, {hidden}", inner)
    head_dim = file.size(".attention.key_length", _default_head_dim(file))
    return sizes | {
        "model_type": "granitemoehybrid",
        "layer_types": [
            _FULL if heads else _LINEAR for heads in file.sizes(".attention.head_count_kv", layers, least=0)
        ],
        "mamba_expand": inner // hidden,
        "num_local_experts": 0,
        "shared_intermediate_size": file.size(key, width, least=0) or width,
        "position_embedding_type": "nope",
        "embedding_multiplier": file.number(".embedding_scale", 0.0) or 1.0,
        "residual_multiplier": file.number(".residual_scale", 0.0) or 1.0,
        "attention_multiplier": file.number(".attention.scale", 0.0) or head_dim**-0.5,
        "logits_scaling": file.number(".logit_scale"),
    }


def _falcon_h1(file: GgufFile) -> Fields:
    """The converter multiplies the tensors by all factors. As in llama.cpp, a norm of results is behind their gate."""
    _without_window(file)
    sizes = _mamba2(file)
    return sizes | {
        "model_type": "falcon_h1",
        "mamba_d_ssm": file.size(".ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.blocks,
        "mamba_norm_before_gate": False,
    }


def _nemotron_h(file: GgufFile) -> Fields:
    """A layer has attention if it has heads of keys, and a feed-forward if that has a width."""
    _without_window(file)
    layers = file.size(".block_count")
    heads = file.sizes(".attention.head_count_kv", layers, least=0)
    widths = file.sizes(".feed_forward_length", layers, least=0)
    kinds = ["mlp" if width else _FULL if kv else _LINEAR for kv, width in zip(heads, widths, strict=True)]
    biased = {name: any(tensor.endswith(f"{part}.bias") for tensor in file.blocks) for name, part in _BIASED.items()}
    epsilon = file.number(".attention.layer_norm_rms_epsilon")
    return (
        _mamba2(file)
        | biased
        | {
            "model_type": "nemotron_h",
            "layers_block_type": kinds,
            "mlp_hidden_act": "relu2",
            "layer_norm_epsilon": epsilon,
        }
    )


_BIASED = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}


def _lfm2(file: GgufFile) -> Fields:
    _without_window(file)
    layers = file.size(".block_count")
    key_heads = file.sizes(".attention.head_count_kv", layers, least=0)
    return {
        "model_type": "lfm2",
        "layer_types": [_FULL if heads else "conv" for heads in key_heads],
        "conv_L_cache": file.size(".shortconv.l_cache"),
        "norm_eps": file.number(".attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,  # the file has the width itself
    }


def _experts(file: GgufFile, *, count: str, width: str, score: str = "softmax") -> Fields:
    """The fields of a mixture of experts.

    Args:
        file: without the width of an expert, that of the feed-forward is theirs.
        count: name of the field of their number.
        width: name of the field of their width.
        score: what the architecture's router computes; files may leave it out.
    """
    gating = file.size(key := ".expert_gating_func", 0, least=0)
    if gating and gating != _ROUTERS.index(score):
        raise file.refusal(key, f"{_ROUTERS.index(score)}, a {score}", gating)
    layers = file.size(".block_count")
    return {
        count: file.size(".expert_count"),
        "num_experts_per_tok": file.shared_size(".expert_used_count", layers),
        width: file.shared_size(
            ".expert_feed_forward_length", layers, file.shared_size(".feed_forward_length", layers)
        ),
        "shared_intermediate_size": file.size(".expert_shared_feed_forward_length", 0, least=0),
    }


def _granitemoe(file: GgufFile) -> Fields:
    mixture = _experts(file, count="num_local_experts", width="intermediate_size")
    return _granite(file) | {"model_type": "granitemoe"} | mixture


def _olmoe(file: GgufFile) -> Fields:
    """As in llama.cpp, a softmax over all experts weighs the chosen ones."""
    mixture = _experts(file, count="num_experts", width="intermediate_size")
    return _plain("olmoe", hidden_act="silu", norm_topk_prob=False)(file) | mixture


def _qwen3moe(file: GgufFile) -> Fields:
    """As in llama.cpp, every layer has experts, and the weights of a token's are divided by their sum."""
    mixture = _experts(file, count="num_experts", width="moe_intermediate_size")
    return _qwen3(file) | {"model_type": "qwen3_moe", "norm_topk_prob": True} | mixture


def _lfm2moe(file: GgufFile) -> Fields:
    """As in llama.cpp, the weights of a token's experts are divided by their sum, and have no factor."""
    mixture = _experts(file, count="num_experts", width="moe_intermediate_size", score="sigmoid")
    dense = file.size(".leading_dense_block_count", 0, least=0)
    corrected = f"blk.{dense}.exp_probs_b.bias" in file.blocks
    fields = {"model_type": "lfm2_moe", "num_dense_layers": dense, "use_expert_bias": corrected}
    return _lfm2(file) | fields | {"norm_topk_prob": True} | mixture


def _olmo2(file: GgufFile) -> Fields:
    """OLMo 2, and OLMo 3, whose files differ by a window."""
    fields = {"model_type": "olmo2", "hidden_act": "silu", "attention_bias": False}
    theta = file.number(".rope.freq_base", 10000.0)
    if not file.size(".attention.sliding_window", 0, least=0):
        _without_window(file)
        return fields
    return fields | {"model_type": "olmo3"} | _local(file, interval=4, theta=theta)


def _qwen35(file: GgufFile) -> Fields:
    """Sections of the rotary embedding have one position each where there is only text, but for the fourth."""
    _without_window(file)
    values, inner = file.size(".ssm.time_step_rank"), file.size(".ssm.inner_size")
    if inner % values:
        raise file.refusal(".ssm.inner_size", f"a multiple of ssm.time_step_rank = {values}", inner)
    sections = file.sizes(".rope.dimension_sections", 4, 0, least=0)
    if sections[3]:
        raise file.refusal(".rope.dimension_sections", "0 in the fourth place, which has no position", sections)
    layers = file.size(".block_count") - further_layers(file)
    interval = file.size(".full_attention_interval", 4)
    recurrent = file.flags(".attention.recurrent_layers", file.size(".block_count"))
    if recurrent is None:
        recurrent = [(layer + 1) % interval != 0 for layer in range(layers)]
    return {
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if is_recurrent else _FULL for is_recurrent in recurrent[:layers]],
        "linear_conv_kernel_dim": file.size(".ssm.conv_kernel"),
        "linear_num_key_heads": file.size(".ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": file.size(".ssm.state_size"),
        "linear_value_head_dim": inner // values,
    }


def further_layers(file: GgufFile) -> int:
    """Layers behind the decoder's, which predict further tokens."""
    name = ".nextn_predict_layers"
    if file.architecture != "qwen35":
        return 0
    count = file.size(name, 0, least=0)
    if count >= file.size(".block_count"):
        raise file.refusal(name, "fewer than all layers", count)
    return count


def _plain(model_type: str, **fields: Any) -> Callable[[GgufFile], Fields]:
    """An architecture without windows whose biases are those of its tensors."""

    def describe(file: GgufFile) -> Fields:
        _without_window(file)
        return {
            "model_type": model_type,
            "attention_bias": "blk.0.attn_q.bias" in file.blocks,
            **fields,
        }

    return describe


def _with_mlp_bias(model_type: str, **fields: Any) -> Callable[[GgufFile], Fields]:
    plain = _plain(model_type, **fields)
    return lambda file: plain(file) | {"mlp_bias": "blk.0.ffn_up.bias" in file.blocks}


def _seed_oss(file: GgufFile) -> Fields:
    _without_window(file)
    bias, out = "blk.0.attn_q.bias" in file.blocks, "blk.0.attn_output.bias" in file.blocks
    return {"model_type": "seed_oss", "attention_bias": bias, "attention_out_bias": out}


def _starcoder2(file: GgufFile) -> Fields:
    """As in llama.cpp, without the window that its configuration may have."""
    _without_window(file)
    return {"model_type": "starcoder2", "use_bias": "blk.0.attn_q.bias" in file.blocks, "sliding_window": None}


def _ernie(file: GgufFile) -> Fields:
    _without_window(file)
    return {"model_type": "ernie4_5", "use_bias": "blk.0.attn_q.bias" in file.blocks}


def _stablelm(file: GgufFile) -> Fields:
    """As in llama.cpp, blocks are in parallel if there is no norm of the feed-forward: the flag may say otherwise."""
    _without_window(file)
    file.flag(".use_parallel_residual")
    return {
        "model_type": "stablelm",
        "use_qkv_bias": "blk.0.attn_q.bias" in file.blocks,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.blocks,
    }


def _gptneox(file: GgufFile) -> Fields:
    _without_window(file)
    return {
        "model_type": "gpt_neox",
        "use_parallel_residual": file.flag(".use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in file.blocks,
    }


def _phi2(file: GgufFile) -> Fields:
    _without_window(file)
    return {"model_type": "phi"}


def _exaone(file: GgufFile) -> Fields:
    _without_window(file)
    return {"model_type": "exaone"}


def _olmo(file: GgufFile) -> Fields:
    """Its norms' epsilon is not in its configuration."""
    _without_window(file)
    key = ".attention.layer_norm_epsilon"
    if (epsilon := file.number(key)) != (expected := 1e-5):
        raise file.refusal(key, f"{expected:g}", epsilon)
    return {"model_type": "olmo"}


def _command_r(file: GgufFile) -> Fields:
    return _plain("cohere", logit_scale=file.number(".logit_scale"))(file)


def _cohere2(file: GgufFile) -> Fields:
    """Which layers have full attention is not in the file: as in llama.cpp, every fourth."""
    return {
        "model_type": "cohere2",
        "logit_scale": file.number(".logit_scale"),
        "sliding_window": file.size(".attention.sliding_window"),
        "layer_types": _layer_types(file, 4),
    }


def _exaone4(file: GgufFile) -> Fields:
    """Layers with full attention are rotated only if no layer has a window."""
    if not file.size(window := ".attention.sliding_window", 0, least=0):
        _without_window(file)
        return {"model_type": "exaone4", "sliding_window": None}
    return {"model_type": "exaone4", "sliding_window": file.size(window), "layer_types": _layer_types(file, 4)}


_ARCHITECTURES: Mapping[str, Callable[[GgufFile], Fields]] = {
    "apertus": _plain("apertus", hidden_act="xielu"),
    "arcee": _with_mlp_bias("arcee", hidden_act="relu2"),
    "cohere2": _cohere2,
    "command-r": _command_r,
    "ernie4_5": _ernie,
    "exaone": _exaone,
    "exaone4": _exaone4,
    "falcon-h1": _falcon_h1,
    "gemma": _plain("gemma", hidden_act="gelu_pytorch_tanh"),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "glm4": _plain("glm4"),
    "gptneox": _gptneox,
    "granite": _granite,
    "granitehybrid": _granite_hybrid,
    "granitemoe": _granitemoe,
    "hunyuan-dense": _plain("hunyuan_v1_dense"),
    "jais2": _with_mlp_bias("jais2", hidden_act="relu2"),
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
    "llama": _llama,
    "nemotron_h": _nemotron_h,
    "nemotron": _with_mlp_bias("nemotron", hidden_act="relu2"),
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "phi2": _phi2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "qwen35": _qwen35,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
