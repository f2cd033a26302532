"""Random checkpoints of real models' exact shapes, written some rows at a time.

    python -m benchmarks.large_checkpoint SHAPE DIR [--layers N]

How integers were chosen does not show in a bundle's speed: `edgekv export DIR -o BUNDLE --effort 0 --no-quality-check`
gives one for benchmarks of the CPU engine.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from edgekv.spec import Config, describe
from edgekv.spec.tensors import views
from exporters.quantize.recipe import Recipe

_TOKENIZER = Path(__file__).parent.parent / "models" / "stdlib-4m" / "tokenizer.json"

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_QWEN: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 257,
    "vocab_size": 151936,
}
_LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "tie_embedding": True,
    "max_position_embeddings": 128000,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "vocab_size": 65536,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _LLAMA
    | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
    },
    "qwen2.5-0.5b": _QWEN
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
    },
    "qwen3-0.6b": _QWEN
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "attention_bias": False,
        "use_sliding_window": False,
    },
    "llama-3.2-1b": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
    },
    "llama-3.1-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "gemma-4-e2b": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        "sliding_window": 512,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
    },
    "granite-3.1-1b-a400m": {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "hidden_size": 1024,
        "intermediate_size": 512,
        "num_local_experts": 32,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "rope_theta": 1500000.0,
        "vocab_size": 49155,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
    },
    "lfm2-350m": _LFM2 | {"hidden_size": 1024, "num_attention_heads": 16, "block_ff_dim": 6656},
    "lfm2.5-1.2b": _LFM2 | {"hidden_size": 2048, "num_attention_heads": 32, "block_ff_dim": 12288},
    "lfm3-1.7b": {
        "architectures": ["Lfm3ForCausalLM"],
        "model_type": "lfm3",
        "norm_eps": 1e-5,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "vocab_size": 128000,
        "bos_token_id": 256,
        "eos_token_id": 257,
    },
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "attention_bias": False,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 262144,
        "vocab_size": 248320,
        "eos_token_id": 257,
    },
}
"""config.json of each; weights are bfloat16."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_ROWS = 4096
_SHARD_BYTES = 4 << 30


def write_large_checkpoint(folder: Path, shape: str, changes: Mapping[str, Any] = _NOTHING) -> Path:
    """Write the folder unless it is there: matrices N(0, 0.02), norms and layer scalars near 1, the embedded model's
    tokenizer of 4,096 tokens.

    `changes` are fields of config.json that differ from the shape's.
    """
    if (folder / "model.safetensors.index.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    fields = {**SHAPES[shape], **changes}
    config = {name: value for name, value in fields.items() if value is not None or name == "rope_scaling"}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copyfile(_TOKENIZER, folder / "tokenizer.json")
    shapes = {view.key: view.stored_shape for view in views(describe(Config(config)))}
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, dimensions in shapes.items():
        if sum(2 * int(np.prod(each)) for each in shards[-1].values()) > _SHARD_BYTES:
            shards.append({})
        shards[-1][name] = dimensions
    files = {f"model-{at:05}-of-{len(shards):05}.safetensors": shard for at, shard in enumerate(shards, start=1)}
    random = np.random.default_rng(0)
    for file, shard in files.items():
        _write_shard(folder / file, shard, random)
    index = {name: file for file, shard in files.items() for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]], random: np.random.Generator) -> None:
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in shapes.items():
            for start in range(0, shape[0], _ROWS):
                rows = min(_ROWS, shape[0] - start)
                values = random.standard_normal((rows, *shape[1:]), np.float32)
                values *= np.float32(0.05 if len(shape) == 1 else 0.02)
                if "norm" in name or "scalar" in name:
                    values += 1
                file.write(values.astype(ml_dtypes.bfloat16).tobytes())


def rounded_to_nearest(recipe: Recipe) -> Recipe:
    """The same types, chosen without calibration."""
    rules = tuple(msgspec.structs.replace(rule, method="nearest") for rule in recipe.weights)
    return msgspec.structs.replace(recipe, weights=rules, rotation="none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="Fewer layers than the model has, which all have the same shape.")
    args = parser.parse_args()
    write_large_checkpoint(args.folder, args.shape, {} if args.layers is None else {"num_hidden_layers": args.layers})


if __name__ == "__main__":
    main()
