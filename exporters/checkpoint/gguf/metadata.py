"""What becomes of each field of a GGUF file's metadata: it is read, it changes nothing, or the file is refused by it.

llama.cpp reads fields of the architecture (`llama.rope.freq_base`), of the tokenizer, and of kinds of models. Any such
field that nothing here has read changes what the model computes, unless it is known to change nothing. Fields under
other names describe the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgekv.errors import CheckpointError
from exporters.checkpoint.gguf.file import GgufFile, short

_QUANTIZATION = "general.quantization_version"
_READ_BY_LLAMA = ("tokenizer.", "adapter.", "diffusion.", "xielu.", _QUANTIZATION)
_WITHOUT_EFFECT: Mapping[str, str] = {
    ".vocab_size": "rows of the table of embeddings say it, and tokens of the tokenizer",
    ".attention.layer_norm_epsilon": "of norms that subtract the mean, which the architecture does not have",
    ".expert_shared_feed_forward_length": "of experts, and without any the tensors of the dense layer say it",
    "tokenizer.ggml.token_type_count": "of BERT's segments",
    "tokenizer.ggml.seperator_token_id": "separates two texts",
    "tokenizer.ggml.add_sep_token": "separates two texts",
    "tokenizer.ggml.cls_token_id": "begins a text that is classified",
    "tokenizer.ggml.mask_token_id": "stands for a token that is guessed",
    "tokenizer.ggml.fim_pre_token_id": "used by programs that complete code, not by the model",
    "tokenizer.ggml.fim_suf_token_id": "likewise",
    "tokenizer.ggml.fim_mid_token_id": "likewise",
    "tokenizer.ggml.prefix_token_id": "an older name of fim_pre_token_id",
    "tokenizer.ggml.suffix_token_id": "an older name of fim_suf_token_id",
    "tokenizer.ggml.middle_token_id": "an older name of fim_mid_token_id",
    "tokenizer.ggml.scores": "of SentencePiece, where the tokenizer is another one",
    "tokenizer.ggml.merges": "of byte-level BPE, where the tokenizer is another one",
    "tokenizer.ggml.pre": "of byte-level BPE, where the tokenizer is another one",
    "tokenizer.ggml.add_space_prefix": "of SentencePiece, where the tokenizer is another one",
    "tokenizer.huggingface.json": "a second description of the same tokenizer, which llama.cpp does not read",
    "tokenizer.rwkv.world": "of RWKV, where the tokenizer is another one",
}
"""Fields that change nothing, by key or its end, with the reason."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    ".activation_sparsity_scale": (0,),
    ".attention.causal": (True,),
    ".attention.clamp_kqv": (0,),
    ".attention.max_alibi_bias": (0,),
    ".attention.output_scale": (0, 1),
    ".attention.rope_pattern": (True,),
    ".attention.recurrent_layers": (False,),
    ".attention.scale": (0,),
    ".attention.shared_kv_layers": (0,),
    ".attention.temperature_length": (0,),
    ".attention.temperature_scale": (0,),
    ".attention.value_scale": (0, 1),
    ".attn_logit_softcapping": (0,),
    ".deepstack_mapping": (-1,),
    ".embedding_length_out": (0,),
    ".embedding_length_per_layer_input": (0,),
    ".embedding_scale": (0, 1),
    ".expert_count": (0,),
    ".expert_feed_forward_length": (0,),
    ".expert_gating_func": (0,),
    ".expert_group_count": (0,),
    ".expert_group_used_count": (0,),
    ".expert_shared_count": (0,),
    ".expert_used_count": (0,),
    ".expert_weights_norm": (False,),
    ".expert_weights_scale": (0, 1),
    ".final_logit_softcapping": (0,),
    ".leading_dense_block_count": (0,),
    ".logit_scale": (0, 1),
    ".moe_every_n_layers": (0,),
    ".n_deepstack_layers": (0,),
    ".nextn_predict_layers": (0,),
    ".pooling_type": (0,),
    ".residual_scale": (0, 1),
    ".rope.dimension_sections": (0,),
    ".rope.scaling.alpha": (0,),
    ".rope.scaling.attn_factor": (1,),
    ".rope.scaling.factor": (0, 1),
    ".rope.scaling.finetuned": (True, False),
    ".rope.scaling.type": ("none",),
    ".rope.scaling.yarn_attn_factor": (1,),
    ".rope.scaling.yarn_beta_fast": (32,),
    ".rope.scaling.yarn_beta_slow": (1,),
    ".rope.scaling.yarn_ext_factor": (-1, 0, 1),
    ".rope.scaling.yarn_log_multiplier": (0,),
    ".router_logit_softcapping": (0,),
    ".swin_norm": (False,),
    ".tensor_data_layout": ("Meta AI original pth",),  # the order of rows that all files of llama.cpp have
    ".use_parallel_residual": (False,),
    _QUANTIZATION: (2,),
    "tokenizer.ggml.normalizer.lowercase": (False,),
    "tokenizer.ggml.normalizer.strip_accents": (False,),
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
}
"""Values that change nothing, of fields that else would; of a list, each entry must be one."""

_RECURRENT = ".ssm."


def check_metadata(file: GgufFile) -> None:
    """Refuse what the file says and nothing has read, unless it changes nothing.

    Raises:
        CheckpointError: naming the field.
    """
    for key, value in sorted(file.unread.items()):
        if not key.startswith((f"{file.architecture}.", *_READ_BY_LLAMA)):
            continue
        name = key.removeprefix(file.architecture)
        if name in _WITHOUT_EFFECT or _is_neutral(value, _NEUTRAL.get(name)):
            continue
        if name.startswith(_RECURRENT) and file.architecture == "granite":
            continue  # written for layers of Granite 4 that a dense model does not have; their tensors are refused
        neutral = _NEUTRAL.get(name)
        raise CheckpointError(
            f"{file.path.name}: {key}",
            got=short(value),
            expected="no such field" if neutral is None else f"none, or {' or '.join(map(str, neutral))}",
            fix=f"edgekv does not know what it changes in the architecture {file.architecture}: choose another model.",
        )


def _is_neutral(value: Any, neutral: tuple[object, ...] | None) -> bool:
    """Whether a value, or each entry of a list, is one of those that change nothing; 1 is not True."""
    if neutral is None:
        return False
    entries = value if isinstance(value, list) else [value]
    return all(
        any(entry == one and (type(entry) is bool) is (type(one) is bool) for one in neutral) for entry in entries
    )
