"""What decoders of transformers have that graphs do not, for a refusal in one sentence."""

from __future__ import annotations

from collections.abc import Mapping

_TYPES: Mapping[str, str] = {
    "experts of another kind": """
    afmoe aria_text beam cohere2_moe dbrx dots1 ernie4_5_moe exaone_moe flex_olmo flint glm4_moe gpt_oss
    granitemoeshared granitemoe_swa hunyuan_v1_moe hy_v3 jetmoe kolibri1 laguna llama4 mimo_v2_flash minimax_m2
    minimax_m3_vl_text mixtral phimoe qwen2_moe qwen3_5_moe qwen3_5_moe_text qwen3_vl_moe qwen3_vl_moe_text sarvam_moe
    solar_open zaya
    """,
    "experts and gated delta rules": "lara_mini qwen3_next qwen4_exp qwen4_exp_text",
    "experts and linear attention": "minimax",
    "latent attention": """
    axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 dots3_note dots3_note_text glm4_moe_lite glm_moe_dsa
    hy_v4 kimi_linear longcat_flash minicpm3 mistral4 sarvam_mla youtu
    """,
    "attention to compressed tokens": "deepseek_v4",
    "Mamba layers of the first kind": "falcon_mamba jamba mamba zamba",
    "Mamba layers alone": "mamba2",
    "Mamba-2 with layers that are shared": "zamba2",
    "recurrent layers": "recurrent_gemma rwkv xlstm",
    "gated delta rules behind norms of their own": "olmo_hybrid",
    "layers that run several times": "hrm_text",
    "positions by a table": """
    bert bert-generation big_bird biogpt camembert ctrl data2vec-text electra ernie git gpt2 gpt_bigcode gpt_neo
    megatron-bert openai-gpt opt rembert roberta roberta-prelayernorm roc_bert xglm xlm xlm-roberta xlm-roberta-xl xmod
    """,
    "positions by biases of scores": "bloom cpmant falcon inkling2_loop_text inkling2_text inkling_text mpt xlnet",
    "an encoder beside the decoder": """
    bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100 marian mbart mllama
    moonshine moonshine_streaming moshi mt5 musicgen musicgen_melody mvp nllb-moe pegasus pegasus_x plbart
    pop2piano prophetnet seamless_m4t seamless_m4t_v2 speech-encoder-decoder speech_to_text speech_to_text_2
    speecht5 switch_transformers t5 t5gemma t5gemma2 trocr umt5 whisper
    """,
    "pictures, or sound, as tokens": "emu3 fuyu got_ocr2 moss_transcribe_diarize phi4_multimodal",
    "patches of bytes": "blt",
    "hashed attention": "reformer",
    "LayerNorm behind its blocks": "roformer",
    "a norm of embeddings, and a layer without one": "modernbert-decoder",
    "states of length 1": "dory",
    "differential attention": "diffllama",
    "masks that depend on the text": "doge",
    "norms within its blocks, and ternary weights": "bitnet",
    "q and k norms that take the mean away": "persimmon",
    "queries, keys and values fused in four parts": "codegen",
    "a bias in one layer alone": "gpt_neox_japanese",
    "sinks of attention": "granite_swa",
    "a head of fewer tokens than embeddings": "apertus1p5_text",
    "sections of the rotary embedding in one kind of layers": "cohere_compass_text",
    "Gemma 4 of another form": "gemma4_unified gemma4_unified_assistant gemma4_unified_text",
    "Laurel, AltUp and activation sparsity": "gemma3n gemma3n_text",
}
LACKING: Mapping[str, str] = {model_type: what for what, types in _TYPES.items() for model_type in types.split()}
"""By `model_type`."""
OTHER_CACHES = frozenset(
    {
        "Mamba layers alone",
        "Mamba layers of the first kind",
        "Mamba-2 with layers that are shared",
        "an encoder beside the decoder",
        "attention to compressed tokens",
        "experts and gated delta rules",
        "experts and linear attention",
        "gated delta rules behind norms of their own",
        "hashed attention",
        "latent attention",
        "layers that run several times",
        "patches of bytes",
        "recurrent layers",
        "states of length 1",
    }
)
"""Those of them with another cache than keys and values of each token, once in every layer."""
ENCODER = "an encoder of pictures or sound, other than those of Gemma, InternVL, LFM2-VL, Qwen-VL and SmolVLM"
"""What a model lacks, if nothing else, whose decoder is described apart."""
