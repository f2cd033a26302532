"""Small random checkpoints with a vision encoder, in Hugging Face layout, and pictures for them."""

from __future__ import annotations

import json
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer

from exporters.quantize.pictures import drawn_picture
from tests.support.checkpoints import CONFIG, GEMMA4, NEWER, WINDOW, random_weights, write_tokenizer

IMAGE_TOKEN, FRAME, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
"""16 patches, which become 4 rows."""
REAL: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
"""The encoder of SmolVLM2-256M and -500M."""
SIZES = ((70, 45), (20, 90), (64, 64), (1, 1), (700, 3))
"""Of pictures whose golden values are kept."""
SHAPED_SIZES = ((100, 60), (70, 45), (20, 90), (64, 64), (1, 1), (60, 110))
"""The same for encoders of pictures with shapes of their own; two are split."""
TEMPLATE = (
    "<|0|>{% for message in messages %}{{message['role'] | capitalize}}: {% if message['content'] is string %}"
    "{{message['content']}}{% else %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endif %}<|1|>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def write_internvl(folder: Path, *, seed: int = 0, gain: float = 2.0, attention_bias: bool = True) -> Path:
    """A random InternVL of the sizes of `SMALL`, whose decoder is a Qwen3."""
    text = CONFIG | NEWER | {"model_type": "qwen3", "tie_word_embeddings": True}
    vision = SMALL | {"attention_bias": attention_bias, "hidden_act": "gelu", "model_type": "internvl_vision"}
    config = {
        "model_type": "internvl",
        "architectures": ["InternVLForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision | {"image_size": [32, 32], "patch_size": [8, 8]},
        "image_token_id": 260,
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    weights = random_weights(text, seed)
    named = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    prepared = {"size": {"height": 32, "width": 32}, "max_patches": 6, "crop_to_patches": True, "resample": 3}
    added = ("<IMG_CONTEXT>", "<img>", "</img>")
    encoder = internvl_weights(config, seed, gain)
    if not attention_bias:
        inputs = tuple(f"attention.{each}_proj.bias" for each in "qkv")
        encoder = {name: value for name, value in encoder.items() if not name.endswith(inputs)}
    return _write(folder, config, prepared, added, named | encoder)


def write_lfm2_vl(folder: Path, *, seed: int = 0, gain: float = 2.0, merged_norm: bool = True) -> Path:
    """A random LFM2-VL with tiles of 48 x 48 pixels, whose positions come from a table of 4 x 4."""
    layers = ["conv", "full_attention", "conv"]
    own = {"model_type": "lfm2", "norm_eps": 1e-5, "num_hidden_layers": 3, "layer_types": layers}
    absent = {"hidden_act": None, "rms_norm_eps": None, "block_auto_adjust_ff_dim": False}
    text = CONFIG | NEWER | own | absent | {"tie_word_embeddings": True}
    vision = {name: value for name, value in SMALL.items() if name != "image_size"}
    config = {
        "model_type": "lfm2_vl",
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision | {"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
        "image_token_id": 260,
        "downsample_factor": 2,
        "projector_hidden_size": 80,
        "projector_use_layernorm": merged_norm,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    prepared = {
        "tile_size": 48,
        "encoder_patch_size": 8,
        "downsample_factor": 2,
        "min_image_tokens": 4,
        "max_image_tokens": 9,
        "max_tiles": 6,
    }
    named = {
        name.replace("model.", "model.language_model.", 1): value for name, value in random_weights(text, seed).items()
    }
    marks = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 7) for column in range(1, 7)]
    added = (IMAGE_TOKEN, "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *marks)
    return _write(folder, config, prepared, added, named | _lfm2_vl_weights(config, seed, gain))


def write_qwen3_vl(folder: Path, *, seed: int = 0, gain: float = 1.5, layers: int = 3) -> Path:
    """A random Qwen3-VL whose pictures have at most 16 rows, and whose positions come from a table of 5 x 5.

    Args:
        folder: to be made.
        seed: of the weights.
        gain: how much a matrix of the encoder amplifies.
        layers: of the decoder, whose first two add rows of pictures.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    own = {"model_type": "qwen3_vl_text", "num_hidden_layers": layers, "rope_parameters": rope}
    text = CONFIG | own | {"tie_word_embeddings": True}
    vision = {
        "model_type": "qwen3_vl_vision",
        "depth": 4,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_heads": 4,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
    }
    config = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "image_token_id": 260,
        "vision_start_token_id": 261,
        "vision_end_token_id": 262,
        "video_token_id": 263,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    prepared = {
        "size": {"shortest_edge": 4 * 16**2, "longest_edge": 16 * 16**2},
        "patch_size": 8,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 3,
    }
    weights = random_weights(text | {"model_type": "qwen3"}, seed)
    named = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    added = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    return _write(folder, config, prepared, added, named | _qwen3_vl_weights(config, seed, gain), place)


def write_qwen2_5_vl(folder: Path, *, seed: int = 0, gain: float = 1.2) -> Path:
    """A random Qwen2.5-VL whose pictures have at most 16 rows, and whose windows are 2 x 2 rows but in one layer."""
    vision = {
        "model_type": "qwen2_5_vl_vision",
        "hidden_size": 48,
        "out_hidden_size": CONFIG["hidden_size"],
        "intermediate_size": 96,
        "hidden_act": "silu",
        "window_size": 32,
        "fullatt_block_indexes": [1],
    }
    return _write_qwen2_vl(folder, "qwen2_5_vl", vision, seed, gain)


def write_qwen2_vl(folder: Path, *, seed: int = 0, gain: float = 1.5) -> Path:
    """A random Qwen2-VL whose pictures have at most 16 rows."""
    vision = {
        "model_type": "qwen2_vl_vision",
        "embed_dim": 48,
        "hidden_size": CONFIG["hidden_size"],
        "mlp_ratio": 2,
        "hidden_act": "quick_gelu",
    }
    return _write_qwen2_vl(folder, "qwen2_vl", vision, seed, gain)


def _write_qwen2_vl(folder: Path, kind: str, vision: dict[str, Any], seed: int, gain: float) -> Path:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = CONFIG | {"model_type": f"{kind}_text", "rope_parameters": rope, "tie_word_embeddings": True}
    sizes = {"depth": 3, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = {
        "model_type": kind,
        "architectures": ["Qwen2_5_VLForConditionalGeneration" if "2_5" in kind else "Qwen2VLForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision | sizes,
        "image_token_id": 260,
        "vision_start_token_id": 261,
        "vision_end_token_id": 262,
        "video_token_id": 263,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    prepared = {"min_pixels": 4 * 16**2, "max_pixels": 16 * 16**2, "patch_size": 8, "merge_size": 2}
    weights = random_weights(text | {"model_type": "qwen2"}, seed)
    named = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    random = np.random.Generator(np.random.PCG64([seed, 8]))

    def matrix(rows: int, *columns: int, gain: float = gain) -> np.ndarray[Any, Any]:
        return (gain * random.standard_normal((rows, *columns)) / np.prod(columns) ** 0.5).astype(np.float32)

    model, hidden, inner, is_rms = "model.visual.", 48, 96, kind == "qwen2_5_vl"
    named[f"{model}patch_embed.proj.weight"] = matrix(hidden, 3, 2, 8, 8)
    norms = [f"{model}merger.ln_q"]
    for layer in range(sizes["depth"]):
        at = f"{model}blocks.{layer}."
        norms += [f"{at}norm1", f"{at}norm2"]
        shapes = {"attn.qkv": (3 * hidden, hidden), "attn.proj": (hidden, hidden)}
        shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj") if is_rms else ("mlp.fc1",), (inner, hidden))
        shapes["mlp.down_proj" if is_rms else "mlp.fc2"] = hidden, inner
        for name, shape in shapes.items():
            named |= {f"{at}{name}.weight": matrix(*shape), f"{at}{name}.bias": _vector(random, shape[0])}
    for norm in norms:
        named[f"{norm}.weight"] = _vector(random, hidden, 1.0)
        if not is_rms:
            named[f"{norm}.bias"] = _vector(random, hidden)
    for number, shape in ((0, (4 * hidden, 4 * hidden)), (2, (text["hidden_size"], 4 * hidden))):
        named[f"{model}merger.mlp.{number}.weight"] = matrix(*shape, gain=1.0)
        named[f"{model}merger.mlp.{number}.bias"] = _vector(random, shape[0])
    added = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    return _write(folder, config, prepared, added, named, "<|vision_start|><|image_pad|><|vision_end|>")


def write_gemma3_vl(folder: Path, *, seed: int = 0, gain: float = 2.0, window: int = WINDOW) -> Path:
    """A random Gemma 3 of the sizes of `SMALL`, whose pictures have 4 rows; a layer of its decoder has a window."""
    own = {"model_type": "gemma3_text", "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"}
    windows = {"sliding_window": window, "layer_types": ["sliding_attention", "full_attention"]}
    text = CONFIG | own | windows | {"query_pre_attn_scalar": 24, "num_hidden_layers": 2}
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": SMALL | {"model_type": "siglip_vision_model", "vision_use_head": False, "image_size": 64},
        "mm_tokens_per_image": 4,
        "image_token_index": 260,
        "boi_token_index": 261,
        "eoi_token_index": 262,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    prepared = {
        "size": {"height": 64, "width": 64},
        "do_pan_and_scan": None,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 2,
        "image_seq_length": 4,
    }
    random = np.random.Generator(np.random.PCG64([seed, 6]))
    hidden, width = SMALL["hidden_size"], text["hidden_size"]
    named = {
        name.replace("model.", "model.language_model.", 1): value for name, value in random_weights(text, seed).items()
    }
    projector = "model.multi_modal_projector.mm_"
    named[projector + "input_projection_weight"] = (3 * random.standard_normal((hidden, width)) / hidden**0.5).astype(
        np.float32
    )
    named[projector + "soft_emb_norm.weight"] = _vector(random, hidden)
    encoder = encoder_weights({**config, "scale_factor": 1}, seed, gain)
    named |= {
        name.replace("model.vision_model.", "model.vision_tower."): value
        for name, value in encoder.items()
        if "connector" not in name
    }
    added = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
    return _write(folder, config, prepared, added, named, added[1])


def write_gemma4_vl(
    folder: Path, *, seed: int = 0, gain: float = 2.0, clipped: bool = False, layered: bool = False
) -> Path:
    """A random Gemma 4 whose pictures have 70 rows at most; two query heads of its encoder share keys and values.

    Args:
        folder: to be made.
        seed: of the weights.
        gain: how much a matrix of the encoder amplifies.
        clipped: whether the encoder's matrices have bounds.
        layered: whether layers of the decoder have inputs, as those of E2B, and the last ones share caches.
    """
    hidden, inner, patch, head_dim = 48, 96, 4, 12
    text = CONFIG | GEMMA4 | {"pad_token_id": 5}
    if not layered:
        text |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "patch_size": patch,
        "pooling_kernel_size": 3,
        "position_embedding_size": 256,
        "use_clipped_linears": clipped,
        "standardize": False,
    }
    config = {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "audio_config": None,
        "image_token_id": 260,
        "boi_token_id": 261,
        "eoi_token_id": 262,
        "video_token_id": 263,
        "audio_token_id": 264,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    prepared = {"patch_size": patch, "max_soft_tokens": 70, "pooling_kernel_size": 3, "do_normalize": False}
    random = np.random.Generator(np.random.PCG64([seed, 7]))

    def matrix(rows: int, columns: int) -> np.ndarray[Any, Any]:
        return (gain * random.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    model = "model.vision_tower."
    named = {
        name.replace("model.", "model.language_model.", 1): value for name, value in random_weights(text, seed).items()
    }
    named |= {
        f"{model}patch_embedder.input_proj.weight": matrix(hidden, 3 * patch**2),
        f"{model}patch_embedder.position_embedding_table": _vector(random, 2 * 256 * hidden).reshape(2, 256, hidden),
        "model.embed_vision.embedding_projection.weight": matrix(text["hidden_size"], hidden) / 2,
    }
    for layer in range(2):
        at = f"{model}encoder.layers.{layer}."
        shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
        shapes |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (2 * head_dim, hidden))
        shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden)) | {"mlp.down_proj": (hidden, inner)}
        named |= {f"{at}{name}.linear.weight": matrix(*shape) for name, shape in shapes.items()}
        for name in shapes if clipped else ():
            reach = 1.5 if name == "self_attn.v_proj" else 2.0  # of inputs; most of q and k have equal ones
            ends = {"input_min": -reach, "input_max": reach - 0.25, "output_min": -3.0, "output_max": 2.5}
            named |= {f"{at}{name}.{end}": np.array(value, np.float32) for end, value in ends.items()}
        norms = {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim, "input_layernorm": hidden}
        norms |= dict.fromkeys(("post_attention_layernorm", "pre_feedforward_layernorm"), hidden)
        norms["post_feedforward_layernorm"] = hidden
        named |= {f"{at}{norm}.weight": _vector(random, width, 1.0) for norm, width in norms.items()}
    added = ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>")
    return _write(folder, config, prepared, added, named, added[0])


def _qwen3_vl_weights(config: dict[str, Any], seed: int, gain: float) -> dict[str, np.ndarray[Any, Any]]:
    """float32 tensors of Qwen3-VL's encoder and mergers, by transformers' names."""
    vision, width = config["vision_config"], config["text_config"]["hidden_size"]
    hidden, patch, merged = vision["hidden_size"], vision["patch_size"], 4 * vision["hidden_size"]
    random = np.random.Generator(np.random.PCG64([seed, 5]))

    def matrix(rows: int, *columns: int, gain: float = gain) -> np.ndarray[Any, Any]:
        return (gain * random.standard_normal((rows, *columns)) / np.prod(columns) ** 0.5).astype(np.float32)

    model = "model.visual."
    found = {
        f"{model}patch_embed.proj.weight": matrix(hidden, 3, 2, patch, patch),
        f"{model}patch_embed.proj.bias": _vector(random, hidden),
        f"{model}pos_embed.weight": _vector(random, vision["num_position_embeddings"] * hidden).reshape(-1, hidden),
    }
    norms = {f"{model}merger.norm": hidden}
    for layer in range(vision["depth"]):
        at = f"{model}blocks.{layer}."
        norms |= {f"{at}norm1": hidden, f"{at}norm2": hidden}
        inner = vision["intermediate_size"]
        shapes = {"attn.qkv": (3 * hidden, hidden), "attn.proj": (hidden, hidden)}
        for name, shape in {**shapes, "mlp.linear_fc1": (inner, hidden), "mlp.linear_fc2": (hidden, inner)}.items():
            found |= {f"{at}{name}.weight": matrix(*shape), f"{at}{name}.bias": _vector(random, shape[0])}
    for number in range(len(vision["deepstack_visual_indexes"])):
        norms[f"{model}deepstack_merger_list.{number}.norm"] = merged
    for norm, size in norms.items():
        found |= {f"{norm}.weight": _vector(random, size, 1.0), f"{norm}.bias": _vector(random, size)}
        if "blocks" not in norm:
            at = norm.removesuffix("norm")
            found |= {f"{at}linear_fc1.weight": matrix(merged, merged), f"{at}linear_fc1.bias": _vector(random, merged)}
            found |= {f"{at}linear_fc2.weight": matrix(width, merged, gain=1.0)}
            found |= {f"{at}linear_fc2.bias": _vector(random, width)}
    return found


def _lfm2_vl_weights(config: dict[str, Any], seed: int, gain: float) -> dict[str, np.ndarray[Any, Any]]:
    """float32 tensors of LFM2-VL's encoder and projector, by transformers' names."""
    width, hidden = config["text_config"]["hidden_size"], config["vision_config"]["hidden_size"]
    random = np.random.Generator(np.random.PCG64([seed, 4]))
    flat = config["vision_config"] | {"image_size": 4 * config["vision_config"]["patch_size"]}
    weights = encoder_weights({**config, "vision_config": flat, "scale_factor": 2}, seed, gain)
    found = {
        name.replace("model.vision_model.", "model.vision_tower."): value
        for name, value in weights.items()
        if "connector" not in name
    }
    patches = "model.vision_tower.embeddings.patch_embedding.weight"
    found[patches] = np.ascontiguousarray(found[patches].transpose(0, 2, 3, 1)).reshape(hidden, -1)
    projector, inner = "model.multi_modal_projector.", config["projector_hidden_size"]
    if config["projector_use_layernorm"]:
        for kind, mean in (("weight", 1.0), ("bias", 0.0)):
            found[f"{projector}layer_norm.{kind}"] = _vector(random, 4 * hidden, mean)
    for name, outputs, inputs in (("linear_1", inner, 4 * hidden), ("linear_2", width, inner)):
        matrix = random.standard_normal((outputs, inputs)) / inputs**0.5
        found[f"{projector}{name}.weight"] = matrix.astype(np.float32)
        found[f"{projector}{name}.bias"] = _vector(random, outputs)
    return found


def _vector(random: np.random.Generator, width: int, mean: float = 0.0) -> np.ndarray[Any, Any]:
    return (mean + 0.2 * random.standard_normal(width)).astype(np.float32)


def write_smolvlm(
    folder: Path,
    vision: dict[str, Any] = SMALL,
    text: dict[str, Any] | None = None,
    *,
    longest: int = 64,
    merge: int = 2,
    seed: int = 0,
    gain: float = 2.0,
) -> Path:
    """A random SmolVLM.

    Args:
        folder: to be made.
        vision: fields of `vision_config`.
        text: changes of `CONFIG` in `text_config`.
        longest: edge to which pictures are resized.
        merge: `scale_factor`.
        seed: of the weights.
        gain: how much a matrix of the encoder amplifies.
    """
    inner = CONFIG | NEWER | {"tie_word_embeddings": False, "hidden_size": 64} | (text or {})
    config = {
        "model_type": "smolvlm",
        "architectures": ["SmolVLMForConditionalGeneration"],
        "text_config": inner,
        "vision_config": {"model_type": "smolvlm_vision", "hidden_act": "gelu_pytorch_tanh", **vision},
        "scale_factor": merge,
        "image_token_id": 260,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    prepared = {
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": vision["image_size"]},
        "do_image_splitting": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 1,
    }
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    weights = random_weights(inner, seed)
    named = {name.replace("model.", "model.text_model.", 1): value for name, value in weights.items()}
    return _write(
        folder, config, prepared, (IMAGE_TOKEN, FRAME, WHOLE, *rows), named | encoder_weights(config, seed, gain)
    )


def _write(
    folder: Path,
    config: dict[str, Any],
    prepared: dict[str, Any],
    added: tuple[str, ...],
    weights: dict[str, np.ndarray[Any, Any]],
    place: str | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, fields in {
        "config.json": config,
        "preprocessor_config.json": prepared,
        "tokenizer_config.json": {},
        "generation_config.json": {"eos_token_id": [257, 258], "bos_token_id": 256},
    }.items():
        (folder / name).write_text(json.dumps(fields))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace(IMAGE_TOKEN, place or added[0]))
    write_tokenizer(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(weights, folder / "model.safetensors")
    return folder


def internvl_weights(config: dict[str, Any], seed: int, gain: float) -> dict[str, np.ndarray[Any, Any]]:
    """float32 tensors of InternVL's encoder and projector, by transformers' names."""
    vision, width = config["vision_config"], config["text_config"]["hidden_size"]
    flat = vision | {"image_size": vision["image_size"][0], "patch_size": vision["patch_size"][0]}
    model, hidden, random = (
        "model.vision_tower.",
        vision["hidden_size"],
        np.random.Generator(np.random.PCG64([seed, 3])),
    )
    renamed = {
        "model.vision_model.embeddings.patch_embedding": f"{model}embeddings.patch_embeddings.projection",
        "model.vision_model.encoder.layers": f"{model}encoder.layer",
        "layer_norm1": "layernorm_before",
        "layer_norm2": "layernorm_after",
        "self_attn.out_proj": "attention.projection_layer",
        "self_attn": "attention",
    }

    def vector(*shape: int, mean: float = 0.0) -> np.ndarray[Any, Any]:
        return (mean + 0.2 * random.standard_normal(shape)).astype(np.float32)

    found = {}
    for name, value in encoder_weights({**config, "vision_config": flat, "scale_factor": 2}, seed, gain).items():
        for theirs, ours in renamed.items():
            name = name.replace(theirs, ours)
        if name.startswith(model):
            found[name] = value
    patches = (flat["image_size"] // flat["patch_size"]) ** 2
    found[f"{model}embeddings.position_embeddings"] = vector(1, patches + 1, hidden)
    found[f"{model}embeddings.cls_token"] = vector(1, 1, hidden)
    for layer in range(vision["num_hidden_layers"]):
        for name in ("lambda_1", "lambda_2"):
            found[f"{model}encoder.layer.{layer}.{name}"] = vector(hidden, mean=0.7)
    projector = "model.multi_modal_projector."
    for norm, mean in (("weight", 1.0), ("bias", 0.0)):
        found[f"{projector}layer_norm.{norm}"] = vector(4 * hidden, mean=mean)
    for name, inputs in (("linear_1", 4 * hidden), ("linear_2", width)):
        found[f"{projector}{name}.weight"] = (random.standard_normal((width, inputs)) / inputs**0.5).astype(np.float32)
        found[f"{projector}{name}.bias"] = vector(width)
    return found


def encoder_weights(config: dict[str, Any], seed: int, gain: float) -> dict[str, np.ndarray[Any, Any]]:
    """float32 tensors of the encoder and the projector, by transformers' names."""
    vision, random = config["vision_config"], np.random.Generator(np.random.PCG64([seed, 2]))
    hidden, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    model = "model.vision_model."

    def matrix(rows: int, *columns: int) -> np.ndarray[Any, Any]:
        width = int(np.prod(columns))
        return (gain * random.standard_normal((rows, *columns)) / width**0.5).astype(np.float32)

    def vector(width: int, mean: float = 0.0) -> np.ndarray[Any, Any]:
        return (mean + 0.2 * random.standard_normal(width)).astype(np.float32)

    found = {
        f"{model}embeddings.patch_embedding.weight": matrix(hidden, 3, patch, patch),
        f"{model}embeddings.patch_embedding.bias": vector(hidden),
        f"{model}embeddings.position_embedding.weight": vector((vision["image_size"] // patch) ** 2 * hidden).reshape(
            -1, hidden
        ),
        "model.connector.modality_projection.proj.weight": matrix(
            config["text_config"]["hidden_size"], hidden * config["scale_factor"] ** 2
        )
        / 2,
    }
    norms = [f"{model}post_layernorm"]
    for layer in range(vision["num_hidden_layers"]):
        at = f"{model}encoder.layers.{layer}."
        norms += [f"{at}layer_norm1", f"{at}layer_norm2"]
        shapes = {f"self_attn.{name}_proj": (hidden, hidden) for name in ("q", "k", "v", "out")}
        for name, shape in {**shapes, "mlp.fc1": (inner, hidden), "mlp.fc2": (hidden, inner)}.items():
            found |= {f"{at}{name}.weight": matrix(*shape), f"{at}{name}.bias": vector(shape[0])}
    for norm in norms:
        found |= {f"{norm}.weight": vector(hidden, 1.0), f"{norm}.bias": vector(hidden)}
    return found


def photo(width: int, height: int, number: int = 0) -> np.ndarray[Any, Any]:
    """A drawn picture `[height, width, 3]`."""
    return drawn_picture(number, max(width, height))[:height, :width]


def png(pixels: np.ndarray[Any, Any], kind: str = "PNG", **options: Any) -> bytes:
    """A picture's file."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def data_uri(content: bytes) -> str:
    """A picture as clients send it."""
    return f"data:image/png;base64,{b64encode(content).decode()}"
