"""`quantization_config` of a checkpoint: the format that its matrices are stored in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgekv.spec import CONFIG, Config
from exporters.checkpoint.quantized.float8 import float8_matrix
from exporters.checkpoint.quantized.matrix import QuantizedMatrix, unreadable
from exporters.checkpoint.quantized.packed import (
    LAYOUTS,
    WORD_BITS,
    PackedLayout,
    Scheme,
    integer_matrix,
    matrix_shape,
)
from exporters.checkpoint.stored import CheckpointTensor, StoredTensor

_ACTIVATIONS = (
    *(".input_scale", ".input_zero_point", ".activation_scale", ".output_scale", ".output_zero_point"),
    *(".k_scale", ".v_scale"),
)
"""Scales of activations, which edgekv observes itself."""

_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
_BEFORE = "Take the checkpoint before quantization."
_ANOTHER = "Take the checkpoint before quantization, or one in another of these."
_DEQUANTIZE = (
    "Take the checkpoint before quantization, or load this one in transformers, call dequantize(), remove "
    "quantization_config from its config and save_pretrained(FOLDER)."
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint was quantized.

    Attributes:
        name: for reports, such as `gptq, int4 in groups of 128`.
        layouts: of its matrices.
        schemes: of the groups of modules.
    """

    name: str
    layouts: tuple[PackedLayout, ...]
    schemes: tuple[Scheme, ...]

    def matrices(self, tensors: Mapping[str, StoredTensor]) -> dict[str, CheckpointTensor]:
        """The tensors with each matrix under the name that it has unquantized.

        Raises:
            CheckpointError: a part of a matrix is missing or of another shape.
        """
        marks = tuple({mark for layout in self.layouts for mark in layout.marks})
        endings = {part for layout in self.layouts for part in layout.parts}
        modules = dict.fromkeys(key.rpartition(".")[0] for key in tensors if key.endswith(marks))
        parts = {module + part for module in modules for part in endings}
        left: dict[str, CheckpointTensor] = {
            key: tensor for key, tensor in tensors.items() if key not in parts and not key.endswith(_ACTIVATIONS)
        }
        return left | {f"{module}.weight": self._matrix(module, tensors) for module in modules}

    def _matrix(self, module: str, tensors: Mapping[str, StoredTensor]) -> QuantizedMatrix:
        layout = next(
            (
                candidate
                for candidate in self.layouts
                if {module + candidate.integers, module + candidate.scales} <= tensors.keys()
            ),
            self.layouts[-1],
        )
        shape = matrix_shape(module, tensors, layout, self.schemes[0].bits)
        key, scale = module + layout.integers, tensors.get(module + layout.scales)
        values = tensors[key]
        scheme = self._scheme(key, layout, values, shape, scale)
        if scheme.floats and scale is not None:
            return float8_matrix(values, module + layout.scales, scale, scheme.block)
        return integer_matrix(module, tensors, layout, scheme)

    def _scheme(
        self, key: str, layout: PackedLayout, values: StoredTensor, shape: tuple[int, int], scale: StoredTensor | None
    ) -> Scheme:
        """The one scheme that fits what is stored."""
        if layout.packed is None:
            is_float8 = values.dtype != np.int8
            fitting = [scheme for scheme in self.schemes if scheme.floats == is_float8 and scheme.bits == 8]
        elif layout.shape:
            fitting = [scheme for scheme in self.schemes if values.shape[1] == -(-shape[1] * scheme.bits // WORD_BITS)]
        else:
            fitting = [*self.schemes]
        if len(fitting) > 1 and scale is not None:
            fitting = [scheme for scheme in fitting if scale.shape[1:] == (scheme.groups(shape[1]),)]
        if len(fitting) != 1:
            raise unreadable(key, "one of the groups of quantization_config", None, f"{len(fitting)} that fit it")
        return fitting[0]


def _gptq(config: Config) -> Quantization:
    if (bits := config.size("bits")) not in (4, 8):
        raise config.refusal("bits", "4 or 8", fix="Take the checkpoint before quantization, or one of 4 or 8 bits.")
    form = config.text("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2") or config.flag("is_marlin_format"):
        raise config.refusal(
            "is_marlin_format" if form in ("gptq", "gptq_v2") else "checkpoint_format",
            "gptq or gptq_v2",
            fix="Take the checkpoint in GPTQ's own format, or the one before quantization.",
        )
    group = config.optional_size("group_size", 128)
    _check_dynamic(config.table("dynamic"), {"bits": bits, "group_size": group})
    return _quantization("gptq", LAYOUTS[form], Scheme(bits, group))


def _check_dynamic(config: Config, common: Mapping[str, object]) -> None:
    """Check that no module is quantized otherwise than the others; those of patterns that begin with `-:` are not."""
    for pattern in config.names:
        if pattern.startswith("-:"):
            config.ignore(pattern)
            continue
        own = config.table(pattern)
        for name, value in common.items():
            if own.optional_size(name, -1) not in (value, -1):
                expected = f"{value}, as of all other modules"
                raise own.refusal(name, expected, fix=f"Modules of different {name} cannot be read. {_BEFORE}")


def _awq(config: Config) -> Quantization:
    if (bits := config.size("bits", 4)) != 4:
        raise config.refusal("bits", "4", got=str(bits), fix=_BEFORE)
    if (version := config.text("version", "gemm")).lower() != "gemm":
        fix = "Take the checkpoint packed for gemm, which is AWQ's default, or the one before quantization."
        raise config.refusal("version", "gemm", got=repr(version)[:80], fix=fix)
    return _quantization("awq", LAYOUTS["awq"], Scheme(bits, config.optional_size("group_size", 128)))


def _fp8(config: Config) -> Quantization:
    if config.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise config.refusal("fmt", "e4m3", fix=_BEFORE)
    block = _block(config, "weight_block_size") if "weight_block_size" in config else None
    scheme = Scheme(8, floats=True, block=block)
    return Quantization(scheme.name, LAYOUTS["fp8"], (scheme,))


def _compressed(config: Config) -> Quantization:
    groups = config.table("config_groups")
    tables = [groups.table(name) for name in groups.names]
    for table in (config, *tables):
        if "format" in table and table.text("format") not in _COMPRESSED:
            raise table.refusal("format", " or ".join(_COMPRESSED), fix=_ANOTHER)
    if config.table("transform_config").names:
        fix = "Take the checkpoint before quantization: its weights are rotated, which its activations must follow."
        raise config.refusal("transform_config", "none", fix=fix)
    if config.table("sparsity_config").text("format", "dense") != "dense":
        raise config.refusal("sparsity_config", "none", fix=_ANOTHER)
    schemes = dict.fromkeys(_scheme(table.table("weights")) for table in tables if "weights" in table)
    if not schemes:
        raise config.refusal("config_groups", "a group of modules with weights")
    return _quantization("compressed-tensors", LAYOUTS["compressed-tensors"], *schemes)


def _scheme(config: Config) -> Scheme:
    """`weights` of an entry of `config_groups`."""
    kind, bits = config.text("type", "int"), config.size("num_bits", 8)
    if kind not in ("int", "float"):
        raise config.refusal("type", "int or float", fix=_ANOTHER)
    if bits not in ((4, 8) if kind == "int" else (8,)):
        raise config.refusal("num_bits", "4 or 8 with int, 8 with float", got=f"{bits} with {kind}", fix=_ANOTHER)
    group = config.optional_size("group_size")
    strategy = config.text("strategy", "group" if group else "tensor")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise config.refusal("strategy", "tensor, channel, group or block", fix=_ANOTHER)
    block = _block(config, "block_structure") if strategy == "block" else None
    return Scheme(bits, group if strategy == "group" else None, config.flag("symmetric", True), kind == "float", block)


def _block(config: Config, name: str) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    height, width = config.numbers(name, 2)
    if not (height.is_integer() and width.is_integer() and max(height, width) < 1 << 31):
        raise config.refusal(name, "two whole numbers above 0")
    return int(height), int(width)


def _quantization(method: str, layouts: tuple[PackedLayout, ...], *schemes: Scheme) -> Quantization:
    return Quantization(f"{method}, {' and '.join(scheme.name for scheme in schemes)}", layouts, schemes)


_UNREAD = """
quant_method quantization_status version backend meta sym desc_act static_groups true_sequential damp_percent
damp_auto_increment act_group_aware lm_head model_name_or_path model_file_base_name tokenizer dataset
block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize batch_size pad_token_id
use_exllama exllama_config exllama disable_exllama max_input_length use_cuda_fp16 model_seqlen cache_block_outputs
zero_point modules_to_not_convert do_fuse modules_to_fuse fuse_max_seq_len ignore ignored_layers kv_cache_scheme
activation_scheme activation_scale_ub global_compression_ratio targets input_activations output_activations
actorder dynamic observer observer_kwargs scale_dtype zp_dtype registry_requires_subclass sparsity_structure
global_sparsity mse failsafe offload_to_disk pack_impl hyb_act dequantize
packing_format autoround_version iters nsamples seqlen lr minmax_lr amp low_gpu_mem_usage provider data_type
to_quant_block_names gradient_accumulate_steps enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input
act_bits act_data_type act_dynamic act_group_size act_sym
"""
_HARMLESS = frozenset(_UNREAD.split())
"""Fields of `quantization_config` that say how weights were quantized, or how programs run them."""
_METHODS: Mapping[str, Callable[[Config], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
}


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """How the matrices are stored; None if they are floats.

    Raises:
        CheckpointError: naming the field of `quantization_config` that cannot be read.
    """
    nested = config.get("text_config")
    tables = [config, nested if isinstance(nested, dict) else {}]
    names = ("quantization_config", "compression_config")
    name, fields = next(
        ((name, table[name]) for table in tables for name in names if table.get(name) is not None), ("", None)
    )
    if fields is None:
        return None
    if not isinstance(fields, dict):
        raise Config(config).refusal(name, "a JSON object")
    quantization = Config(_without_ones(fields), f"{CONFIG}: {name}")
    if "quant_method" not in quantization and isinstance(config.get("quantization"), dict):
        fix = "Take the checkpoint that it was converted from."
        raise Config(config).refusal("quantization", "weights that transformers reads", got="those of MLX", fix=fix)
    method = quantization.text("quant_method", "compressed-tensors" if "config_groups" in quantization else None)
    if method not in _METHODS:
        raise quantization.refusal("quant_method", " or ".join(_METHODS), fix=_DEQUANTIZE)
    schemes = _METHODS[method](quantization)
    quantization.check_read(_HARMLESS)
    return schemes


def _without_ones(fields: Mapping[str, Any], depth: int = 3) -> dict[str, Any]:
    """Null where a group size is -1, all inputs of a channel; `weights` of groups of modules lie three objects deep."""
    return {
        name: None
        if name == "group_size" and value == -1
        else _without_ones(value, depth - 1)
        if isinstance(value, dict) and depth
        else value
        for name, value in fields.items()
    }
