"""Checkpoints as other programs write them: quantized folders of Hugging Face, LoRA adapters, and GGUF files.

Quantized matrices are those of the layers of a folder of floats, rounded to nearest and packed in plain loops over the
published layout; a writer returns the weights that this means: `(integer - zero point) * scale` in float32.
GGUF files are as llama.cpp's converter writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf.quants import quantize
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

from edgekv.spec import Config, DecoderSpec, describe, views
from edgekv.spec.decoder import Experts
from exporters.checkpoint.stored import tensors_of

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Rounded:
    """A matrix as unsigned integers `[out, in]`, with scales and zero points `[out, groups]`."""

    integers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    order: np.ndarray  # the group of each input

    @property
    def values(self) -> np.ndarray:
        scaled = self.integers.astype(np.float32) - self.zeros[:, self.order].astype(np.float32)
        return scaled * self.scales.astype(np.float32)[:, self.order]


def rounded(
    matrix: np.ndarray,
    bits: int,
    group: int | None,
    *,
    symmetric: bool = True,
    seed: int | None = None,
    dtype: Any = np.float16,
) -> Rounded:
    """To nearest, in groups of neighbours, or, with a seed, of inputs in random order."""
    inputs = matrix.shape[1]
    order = np.arange(inputs) // (group or inputs)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(order)
    groups, most = int(order.max()) + 1, 2**bits - 1
    low = np.stack([matrix[:, order == each].min(axis=1) for each in range(groups)], axis=1).clip(None, 0)
    high = np.stack([matrix[:, order == each].max(axis=1) for each in range(groups)], axis=1).clip(0, None)
    if symmetric:
        scales = (2 * np.maximum(-low, high) / most).astype(dtype)
        zeros = np.full(scales.shape, 2 ** (bits - 1), np.int64)
    else:
        scales = ((high - low) / most).astype(dtype)
        zeros = np.rint(-low / scales.astype(np.float32)).clip(0, most).astype(np.int64)
    steps = scales.astype(np.float32)[:, order]
    return Rounded(np.rint(matrix / steps + zeros[:, order]).clip(0, most).astype(np.int64), scales, zeros, order)


def packed(integers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """int32 from unsigned integers along the last axis; `order` names the element in each place of a word."""
    in_word = 32 // bits
    padded = np.pad(integers, [(0, 0)] * (integers.ndim - 1) + [(0, -integers.shape[-1] % in_word)])
    words = np.zeros((*padded.shape[:-1], padded.shape[-1] // in_word), np.int64)
    for place, element in enumerate(order or range(in_word)):
        words |= padded[..., element::in_word] << (bits * place)
    return words.astype(np.uint32).view(np.int32)


def write_gptq(
    folder: Path, bits: int = 4, group: int | None = 32, *, version: int = 1, act_order: bool = False, **how: Any
) -> Arrays:
    def parts(name: str, matrix: np.ndarray) -> tuple[Arrays, np.ndarray]:
        made = rounded(matrix, bits, group, seed=len(name) if act_order else None, **how)
        zeros = (made.zeros - (version == 1)) % 2**bits
        return {
            "qweight": np.ascontiguousarray(packed(made.integers, bits).T),
            "qzeros": packed(np.ascontiguousarray(zeros.T), bits),
            "scales": np.ascontiguousarray(made.scales.T),
            "g_idx": made.order.astype(np.int32),
            "bias": np.zeros(len(matrix), np.float16),
        }, made.values

    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": act_order, "sym": True}
    return _write(folder, parts, config | ({"checkpoint_format": "gptq_v2"} if version == 2 else {}))


def write_awq(folder: Path, group: int = 32, **how: Any) -> Arrays:
    def parts(name: str, matrix: np.ndarray) -> tuple[Arrays, np.ndarray]:
        made = rounded(matrix, 4, group, **how)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": packed(np.ascontiguousarray(made.integers.T), 4, order),
            "qzeros": packed(np.ascontiguousarray(made.zeros.T), 4, order),
            "scales": np.ascontiguousarray(made.scales.T),
        }, made.values

    return _write(folder, parts, {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"})


def write_compressed(
    folder: Path, bits: int = 4, group: int | None = None, *, packs: bool = True, **how: Any
) -> Arrays:
    symmetric = how.get("symmetric", True)

    def parts(name: str, matrix: np.ndarray) -> tuple[Arrays, np.ndarray]:
        made = rounded(matrix, bits, group, **how)
        found: Arrays = {"weight_scale": made.scales}
        if packs:
            found |= {"weight_packed": packed(made.integers, bits), "weight_shape": np.array(matrix.shape)}
        else:
            found |= {"weight": (made.integers - 2 ** (bits - 1)).astype(np.int8)}
        if not symmetric and packs:
            found["weight_zero_point"] = np.ascontiguousarray(packed(np.ascontiguousarray(made.zeros.T), bits).T)
        elif not symmetric:
            found["weight_zero_point"] = (made.zeros - 2 ** (bits - 1)).astype(np.int8)
        return found, made.values

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel"}
    weights |= {"group_size": group} if group else {}
    form = "pack-quantized" if packs else "int-quantized"
    activations = None if packs else {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    entry = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": entry}}
    return _write(folder, parts, config | {"ignore": ["lm_head"], "quantization_status": "compressed"})


def write_float8(
    folder: Path, block: int | None = None, *, form: str = "fp8", scale: str = "channel", powers: bool = False
) -> Arrays:
    """In blocks of `block` x `block`, or with one scale for a row (`channel`) or for all (`tensor`).

    `powers` rounds scales up to powers of two.
    """

    def parts(name: str, matrix: np.ndarray) -> tuple[Arrays, np.ndarray]:
        rows, columns = matrix.shape
        height, width = (block, block) if block else (1 if scale == "channel" else rows, columns)
        tall, wide = -(-rows // height), -(-columns // width)
        scales = np.zeros((tall, wide), np.float32)
        for i in range(tall):
            for j in range(wide):
                part = matrix[i * height : (i + 1) * height, j * width : (j + 1) * width]
                scales[i, j] = np.abs(part).max() / 448
        scales = np.exp2(np.ceil(np.log2(scales))) if powers else scales
        whole = np.repeat(np.repeat(scales, height, axis=0), width, axis=1)[:rows, :columns]
        stored = (matrix / whole).astype(ml_dtypes.float8_e4m3fn)
        key = "weight_scale_inv" if block and form == "fp8" else "weight_scale"
        kept = scales.reshape(()) if scale == "tensor" and not block else scales
        return {"weight": stored, key: kept, "input_scale": np.ones((), np.float32)}, stored.astype(np.float32) * whole

    if form == "fp8":
        config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return _write(folder, parts, config | ({"weight_block_size": [block, block]} if block else {}))
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "block" if block else scale}
    weights |= {"block_structure": [block, block]} if block else {}
    entry = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": entry}}
    return _write(folder, parts, config)


def _write(
    folder: Path, parts: Callable[[str, np.ndarray], tuple[Arrays, np.ndarray]], config: dict[str, Any]
) -> Arrays:
    """Replace the matrices of the layers by their parts; returns what they mean."""
    stored: Arrays = {}
    meant: Arrays = {}
    for key, values in read_tensors(folder).items():
        if values.ndim == 1 or not key.startswith("model.layers."):
            stored[key] = values
            continue
        module = key.removesuffix(".weight")
        found, meant[key] = parts(key, values.astype(np.float32))
        stored = {f"{module}.{part}": value for part, value in found.items()} | stored
    save_file(stored, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return meant


def read_tensors(folder: Path) -> Arrays:
    """Every tensor of a folder, float8 included."""
    return {key: np.array(tensor.open()) for key, tensor in tensors_of(folder / "model.safetensors")}


ATTENTION = ("q_proj", "v_proj")


def write_adapter(
    folder: Path,
    base: Path,
    targets: Any = ATTENTION,
    *,
    rank: int = 4,
    ranks: dict[str, int] | None = None,
    seed: int = 0,
    more: Arrays | None = None,
    **config: Any,
) -> Arrays:
    """An adapter of every module of `base` whose name ends with one of `targets`; returns its tensors.

    Args:
        folder: to be made.
        base: a folder of floats.
        targets: ends of names.
        rank: r.
        ranks: r of modules with these ends.
        seed: of the matrices.
        more: tensors to add to the file.
        config: fields of adapter_config.json.
    """
    random = np.random.default_rng(seed)
    tensors: Arrays = {}
    for key, value in read_tensors(base).items():
        module = key.removesuffix(".weight")
        if value.ndim != 2 or not module.endswith(tuple(targets)):
            continue
        r = next((r for end, r in (ranks or {}).items() if module.endswith(end)), rank)
        out, width = value.shape
        first = random.standard_normal((r, width)).astype(np.float32) / np.float32(np.sqrt(width))
        second = random.standard_normal((out, r)).astype(np.float32)
        at = f"base_model.model.{module}"
        if module.endswith("embed_tokens"):
            tensors |= {f"{at}.lora_embedding_A": np.ascontiguousarray(second.T)}
            tensors |= {f"{at}.lora_embedding_B": np.ascontiguousarray(first.T)}
        else:
            tensors |= {f"{at}.lora_A.weight": first, f"{at}.lora_B.weight": second}
    tensors |= more or {}
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/base",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": list(targets),
        "rank_pattern": ranks or {},
        "bias": "none",
        "use_dora": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


GGUF_NAMES = {
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
    "mlp.router": "ffn_gate_inp",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
}
GGUF_TABLES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
GGUF_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GGUF_DELTA_RULE = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
GGUF_GEMMA4 = GGUF_POST_NORMS | {
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
GGUF_MAMBA = {
    "linear_attn.in_proj": "ssm_in",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
WITH_MAMBA = ("falcon-h1", "granitehybrid", "nemotron_h")
GGUF_ARCHITECTURES = {
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "cohere": "command-r",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_neox": "gptneox",
    "hunyuan_v1_dense": "hunyuan-dense",
    "lfm2_moe": "lfm2moe",
    "olmo3": "olmo2",
    "phi": "phi2",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
}
INTERLEAVED = ("arcee", "llama", "granite", "granitemoe", "olmo", "smollm3")
GGUF_OFFSET = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35")
GGUF_SPECIAL = {
    **dict.fromkeys(("exaone4", "gemma2", "gemma3", "glm4", "olmo2"), GGUF_POST_NORMS),
    "falcon-h1": GGUF_MAMBA,
    "granitehybrid": GGUF_MAMBA,
    "gemma4": GGUF_GEMMA4,
    "nemotron_h": GGUF_MAMBA | {"post_attention_layernorm": "attn_norm"},
    "qwen35": GGUF_DELTA_RULE,
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
}
SLIDING = "sliding_attention"
WINDOWED = ("cohere2", "exaone4", "gemma2", "gemma3", "gemma4", "olmo2", "phi3")
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
    architecture, spec = GGUF_ARCHITECTURES.get(config["model_type"], config["model_type"]), describe(Config(config))
    own = zip(views(spec), views(replace(spec, stored_names=())), strict=True)
    names = {stored.key: named.key for stored, named in own}
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors)
    fields = {key.format(arch=architecture): value for key, value in gguf_metadata(config, architecture, spec).items()}
    fields |= tokenizer_fields(checkpoint, config, architecture)
    of_matrices, experts = gguf.GGMLQuantizationType[kind], dict[tuple[str, int], np.ndarray]()
    for shard in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(shard, "numpy") as file:
            for key in file.keys():  # noqa: SIM118  (not a dict)
                values = file.get_tensor(key).astype(np.float32)
                if ".act_fn." in key:
                    fields.setdefault(f"xielu.{key.rsplit('.', 1)[1]}", []).append(float(values.reshape(())))
                    continue
                if ".mlp.experts." in (own_name := names.get(key, key)):
                    experts.update(expert_matrices(own_name, values))
                    continue
                name, values = converted(own_name, values, config, architecture)
                rest = name.replace("shortconv.in", "").replace("shortconv.out", "")
                is_vector = "conv" in rest or name.endswith(("ssm_a", "ssm_d", "ssm_norm.weight"))
                is_matrix = values.ndim == 2 and not is_vector and "ffn_gate_inp" not in name
                kept = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
                writer.add_tensor(name, quantize(values, kept), raw_dtype=kept)
    for name in dict.fromkeys(name for name, _ in experts):
        together = np.stack([experts[name, expert] for expert in range(spec.experts.count)])
        writer.add_tensor(name, quantize(together, of_matrices), raw_dtype=of_matrices)
    if architecture == "gemma4":
        half = config["global_head_dim"] // 2
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * (half // 4) + [1e30] * (half - half // 4), np.float32))
    for name, values in extra.items():
        writer.add_tensor(name, values)
    for key, value in (fields | changes).items():
        if value is not None:
            _add(writer, key, value)
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


def gguf_metadata(config: dict[str, Any], architecture: str, spec: DecoderSpec) -> dict[str, Any]:
    head_dim, rope = spec.head_dim, config.get("rope_parameters", {})
    fields = {
        "{arch}.block_count": spec.layers,
        "{arch}.context_length": spec.max_positions,
        "{arch}.embedding_length": spec.hidden,
        "{arch}.feed_forward_length": spec.intermediate,
        "{arch}.attention.head_count": spec.heads,
        "{arch}.attention.head_count_kv": spec.kv_heads,
        "{arch}.attention.key_length": head_dim,
        "{arch}.attention.value_length": head_dim,
        f"{{arch}}.attention.layer_norm_{'' if spec.layer_norms else 'rms_'}epsilon": spec.eps,
        "{arch}.rope.freq_base": float(spec.rope.theta),
        "{arch}.rope.dimension_count": spec.rope.width,
    }
    if architecture in WINDOWED and config.get("sliding_window") is not None:
        fields["{arch}.attention.sliding_window"] = config["sliding_window"]
    if config["model_type"] == "olmo3":
        fields["{arch}.attention.sliding_window_pattern"] = [each == SLIDING for each in config["layer_types"]]
    if (full := rope.get("full_attention", rope)) and architecture != "gemma4":
        fields |= scaling(full)
    if architecture == "gemma2":
        fields["{arch}.attn_logit_softcapping"] = config["attn_logit_softcapping"]
        fields["{arch}.final_logit_softcapping"] = config["final_logit_softcapping"]
    if architecture == "gemma4":
        fields |= gemma4_metadata(config)
    if spec.experts is not None:
        fields |= expert_metadata(config, architecture, spec.experts)
    if architecture in ("lfm2", "lfm2moe"):
        kinds = config["layer_types"]
        fields["{arch}.attention.head_count_kv"] = [config["num_key_value_heads"] * (kind != "conv") for kind in kinds]
        fields["{arch}.shortconv.l_cache"] = config.get("conv_L_cache", 3)
        for width in ("key_length", "value_length"):
            del fields[f"{{arch}}.attention.{width}"]
    if (rule := spec.delta_rule) is not None and architecture in WITH_MAMBA:
        sizes = {"conv_kernel": rule.kernel, "group_count": rule.key_heads, "time_step_rank": rule.value_heads}
        sizes |= {"state_size": rule.key_dim, "inner_size": rule.values}
        fields |= {f"{{arch}}.ssm.{name}": size for name, size in sizes.items()}
    if architecture == "nemotron_h":
        layers = range(spec.layers)
        fields["{arch}.attention.head_count_kv"] = [spec.kv_heads * spec.has_attention(layer) for layer in layers]
        fields["{arch}.feed_forward_length"] = [spec.intermediate * spec.has_feed_forward(layer) for layer in layers]
    if architecture == "qwen35":
        heads = config["linear_num_value_heads"]
        fields["{arch}.ssm.conv_kernel"] = 4
        fields["{arch}.ssm.group_count"] = config["linear_num_key_heads"]
        fields["{arch}.ssm.time_step_rank"] = heads
        fields["{arch}.ssm.state_size"] = config["linear_key_head_dim"]
        fields["{arch}.ssm.inner_size"] = heads * config["linear_value_head_dim"]
        fields["{arch}.full_attention_interval"] = 4
        fields["{arch}.rope.dimension_sections"] = [*rope["mrope_section"], 0]
        fields["{arch}.attention.recurrent_layers"] = [each == "linear_attention" for each in config["layer_types"]]
    if architecture in ("exaone4", "cohere2"):
        fields["{arch}.attention.sliding_window_pattern"] = [window is not None for window in spec.windows]
    if architecture in ("command-r", "cohere2"):
        fields["{arch}.logit_scale"] = config["logit_scale"]
    if architecture in ("gptneox", "stablelm"):
        fields["{arch}.use_parallel_residual"] = spec.parallel is not None
    if architecture in ("granite", "granitemoe"):
        fields["{arch}.embedding_scale"] = config["embedding_multiplier"]
        fields["{arch}.residual_scale"] = config["residual_multiplier"]
        fields["{arch}.attention.scale"] = config["attention_multiplier"]
        fields["{arch}.logit_scale"] = config["logits_scaling"]
    return fields


def expert_metadata(config: dict[str, Any], architecture: str, experts: Experts) -> dict[str, Any]:
    """What the converter writes of a mixture of experts."""
    fields = {"{arch}.expert_count": experts.count, "{arch}.expert_used_count": experts.used}
    if "moe_intermediate_size" in config:
        fields["{arch}.expert_feed_forward_length"] = experts.intermediate
    if architecture == "lfm2moe":
        fields["{arch}.expert_gating_func"] = int(gguf.ExpertGatingFuncType.SIGMOID)
        fields["{arch}.leading_dense_block_count"] = config["num_dense_layers"]
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
    if architecture in GGUF_OFFSET and key.endswith("norm.weight") and "linear_attn" not in key:
        values = values + 1
    if architecture in WITH_MAMBA:
        if key.endswith(("A_log", ".D")):
            values = values[:, None]
        elif key.endswith("linear_attn.norm.weight"):
            values = values.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
        if key.endswith(".D"):
            return f"blk.{key.split('.')[2]}.ssm_d", values
        if architecture == "falcon-h1" and key.endswith("post_attention_layernorm.weight"):
            return f"blk.{key.split('.')[2]}.ffn_norm", values
    elif ".linear_attn." in key:
        values = tiled(key, values, config)
    if key.endswith("A_log"):
        return f"blk.{key.split('.')[2]}.ssm_a", -np.exp(values)
    if key.endswith("dt_bias"):
        return f"blk.{key.split('.')[2]}.ssm_dt.bias", values
    if key.endswith("conv1d.weight"):
        values = values[:, 0]
    if architecture in ("lfm2", "lfm2moe") and key == "model.norm.weight":
        return "token_embd_norm.weight", values
    if key.endswith("conv.conv.weight"):
        values = values[:, 0]
    if key.endswith("router.correction"):
        return f"blk.{key.split('.')[2]}.exp_probs_b.bias", values
    if key.endswith("layer_scalar"):
        return f"blk.{key.split('.')[2]}.layer_output_scale.weight", values
    if (table := GGUF_TABLES.get(key.rsplit(".", 1)[0])) is not None:
        return f"{table}.{key.rsplit('.', 1)[1]}", values
    _, _, layer, rest = key.split(".", 3)
    part, suffix = rest.rsplit(".", 1)
    names = GGUF_NAMES | GGUF_SPECIAL.get(architecture, {})
    if architecture == "gptneox" and part == "self_attn.qkv_proj":
        by_head = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
        values = by_head.swapaxes(0, 1).reshape(values.shape)
    if architecture in INTERLEAVED and part in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config["num_attention_heads"]
        heads = heads if part == "self_attn.q_proj" else config.get("num_key_value_heads") or heads
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    return f"blk.{layer}.{names[part]}.{suffix}", values


def expert_matrices(key: str, values: np.ndarray) -> Iterator[tuple[tuple[str, int], np.ndarray]]:
    """Matrices of experts by the tensor of the file that has them and their number: of one, or of all of a layer."""
    layer, rest = key.split(".")[2], key.split(".mlp.experts.")[1]
    if rest == "gate_up_proj":
        for name, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            yield from (((f"blk.{layer}.ffn_{name}_exps.weight", expert), one) for expert, one in enumerate(half))
    elif rest == "down_proj":
        yield from (((f"blk.{layer}.ffn_down_exps.weight", expert), one) for expert, one in enumerate(values))
    else:
        expert, projection, _ = rest.split(".")
        yield (f"blk.{layer}.ffn_{projection.removesuffix('_proj')}_exps.weight", int(expert)), values


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
