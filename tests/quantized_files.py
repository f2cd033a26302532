"""Quantized Hugging Face folders, written as the packages that publish them write them.

Each writer rounds the matrices of the layers of a folder of floats to nearest, packs them in plain loops over the
published layout, and returns the weights that this means: `(integer - zero point) * scale` in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

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
