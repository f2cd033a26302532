"""Fields of `config.json` that change nothing of what a model computes, so that no code reads them.

Every other field must be read, or the checkpoint is refused by its name; see `Config.check_read`. A field stands here
only if transformers computes the same with any value of it, which the test of configurations shows (`make test-long`).
"""

from __future__ import annotations

from collections.abc import Mapping

_TRAINING = """
attention_dropout residual_dropout hidden_dropout hidden_dropout_prob resid_pdrop embd_pdrop attn_pdrop
classifier_dropout projection_dropout dropout embedding_dropout initializer_range initializer_factor
layer_scale_init_value gradient_checkpointing use_reentrant_checkpoints neftune_noise_alpha pretraining_tp
router_aux_loss_coef output_router_logits init_method tf_legacy_loss problem_type id2label label2id num_labels
finetuning_task task_specific_params
"""
_FILES_AND_PROGRAMS = """
model_type architectures auto_map _name_or_path name_or_path transformers_version transformers.js_config dtype
torch_dtype torchscript use_bfloat16 tokenizer_class use_cache cache_implementation is_decoder is_encoder_decoder
is_llama_config add_cross_attention cross_attention_hidden_size tie_encoder_decoder chunk_size_feed_forward
output_attentions output_hidden_states return_dict return_dict_in_generate output_scores pruned_heads prefix
_attn_implementation_autoset attn_implementation _attn_implementation _flash_attn_2_enabled _commit_hash
unsloth_fixed unsloth_version use_mambapy
"""
_GENERATION = """
bad_words_ids begin_suppress_tokens suppress_tokens diversity_penalty do_sample early_stopping temperature top_k top_p
typical_p repetition_penalty length_penalty encoder_no_repeat_ngram_size no_repeat_ngram_size max_length min_length
max_new_tokens num_beams num_beam_groups num_return_sequences remove_invalid_values exponential_decay_length_penalty
forced_bos_token_id forced_eos_token_id
"""
_QUANTIZED = "quantization_config compression_config quantization"
"""They say how weights are stored; `exporters.checkpoint.quantized` reads them."""
_ENDINGS = "_token_id _token_ids _token_index"
_ENCODERS = """
vision_config audio_config image_seq_length mm_tokens_per_image vision_soft_tokens_per_image image_seq_len
multimodal_projector_bias projector_hidden_act projector_ln_eps spatial_merge_size vision_feature_layer
vision_feature_select_strategy downsample_ratio scale_factor
"""
"""Of multimodal models: `exporters.checkpoint.vision` reads those of the encoders that are exported."""

COMMON = frozenset(" ".join((_TRAINING, _FILES_AND_PROGRAMS, _GENERATION, _QUANTIZED, _ENDINGS)).split())
"""Those of every architecture. A name that begins with `_` stands for all that end with it, too."""

_OFF = (
    "attention_bias mlp_bias lm_head_bias qkv_bias use_bias qk_layernorm use_sliding_window use_mrope rope_interleaved"
)
OFF = frozenset(_OFF.split())
"""Flags that many programs write as false, for architectures without what they turn on."""

_GEMMA = "hidden_act sliding_window_size _sliding_window_pattern"
_GEMMA4 = (
    f"{_GEMMA} num_experts top_k_experts moe_intermediate_size expert_intermediate_size num_global_key_value_heads"
)
"""Of experts and of `attention_k_eq_v`, which are refused."""
_MULTIMODAL = (
    "embedding_gemma2", "gemma3", "gemma4", "internvl", "lfm2_vl", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
    "qwen3_5", "smolvlm",
)  # fmt: skip
_OWN: Mapping[str, str] = {
    "bamba": "attn_rotary_emb mamba_chunk_size num_logits_to_keep z_loss_coefficient",
    "falcon_h1": "mamba_chunk_size num_logits_to_keep mamba_use_mlp mlp_expansion_factor",
    "nemotron_h": "chunk_size expand residual_in_fp32 rescale_prenorm_residual use_mamba_kernels num_logits_to_keep "
    "time_step_max time_step_floor time_step_limit mamba_ssm_cache_dtype num_hidden_layers n_routed_experts "
    "n_shared_experts moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size n_group topk_group "
    "moe_shared_expert_overlap num_experts_per_tok routed_scaling_factor norm_topk_prob num_nextn_predict_layers "
    "mtp_layers_block_type mtp_hybrid_override_pattern rope_theta partial_rotary_factor",
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "embedding_gemma2": _GEMMA,
    "gemma4": _GEMMA4,
    "gemma4_assistant": f"{_GEMMA4} use_ordered_embeddings num_centroids centroid_intermediate_top_k",
    # of experts
    "granitemoehybrid": "intermediate_size num_experts_per_tok mamba_chunk_size",
    # of the authors' own program
    "lfm2": "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu hidden_act "
    "block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads theta use_pos_enc full_attn_idxs",
    "lfm3": "hidden_act",
    "lfm2_vl": "projector_hidden_size projector_bias projector_use_layernorm downsample_factor do_image_splitting "
    "encoder_patch_size max_image_tokens min_image_tokens max_num_patches max_pixels_tolerance max_tiles min_tiles "
    "tile_size use_image_special_tokens use_thumbnail",
    "phi3": "original_max_position_embeddings",
    "qwen3_5": "mtp_num_hidden_layers mtp_use_dedicated_embeddings mamba_ssm_dtype mlp_only_layers",
    "smollm3": "max_window_layers",
    "smolvlm": "perceiver_config pixel_shuffle_factor",
}


_VISION = """
drop_path_rate use_mask_token max_image_size size tie_word_embeddings use_base_siglip attention_type vision_use_head
"""
ENCODER = COMMON | {*_VISION.split()}
"""Of `vision_config` of an encoder that is exported."""
_PROCESSOR = """
image_processor_type processor_class feature_extractor_type auto_map do_pad data_format input_data_format device
return_tensors crop_size disable_grouping video_sampling image_seq_len image_seq_length default_to_square pad_size
crop_to_patches do_video_splitting max_num_patches return_row_col_info use_image_special_tokens
"""
PROCESSOR = frozenset(_PROCESSOR.split())
"""Of `preprocessor_config.json`: pictures are padded and cut as their architecture says."""


def harmless(model_type: str) -> frozenset[str]:
    """The fields that change nothing of an architecture, at any depth of its configuration."""
    own = _OWN.get(model_type.removesuffix("_text"), "")
    encoders = _ENCODERS if model_type in _MULTIMODAL else ""
    return COMMON | {*own.split(), *encoders.split()}
