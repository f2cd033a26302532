"""The tensors of a GGUF file under their Hugging Face names, dequantized when they are read."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import CheckpointError
from edgekv.spec.tensors import LAYER_TABLE, LAYER_TABLE_NORM, LAYER_TABLE_PROJECTION, expert_projection
from exporters.checkpoint.gguf.config import further_layers
from exporters.checkpoint.gguf.file import GgufFile
from exporters.checkpoint.gguf.part import Block
from exporters.checkpoint.gguf.rope import TENSORS
from exporters.checkpoint.stored import ComputedTensor

PLAIN_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
TABLE_TYPES = (
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
    *("TQ1_0", "TQ2_0"),
)
"""Integers of a block stand for numbers of a table. Files whose rows are no multiple of 256 have IQ4_NL in place of
Q4_K and IQ4_XS."""
TYPES = (*PLAIN_TYPES, *K_TYPES, *TABLE_TYPES)
"""The stored types that can be read. Those of llama.cpp that are missing: NVFP4 has scales in tensors of their own, and
package gguf does not read Q1_0 and Q2_0, nor MXFP4 before version 0.18."""

_LAYER = re.compile(r"blk\.(\d+)\.([a-z0-9_.]+?)(?:\.(weight|bias))?")
_TABLES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.norm.weight",  # what LFM2's files call it
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
    "per_layer_token_embd.weight": LAYER_TABLE,
    "per_layer_model_proj.weight": LAYER_TABLE_PROJECTION,
    "per_layer_proj_norm.weight": LAYER_TABLE_NORM,
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.router",
    "exp_probs_b": "mlp.router.correction",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
_POST_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = _POST_NORMS | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
}
_GLM4 = _POST_NORMS | {"ffn_up": "mlp.gate_up_proj"}
_DELTA_RULE = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_EXPERTS = {  # all experts of a layer as one tensor: the projections whose rows follow each other
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
_MAMBA = {
    "ssm_in": "linear_attn.in_proj",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_d": "linear_attn.D",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_VECTORS = ("linear_attn.dt_bias", "linear_attn.A_log", "linear_attn.D", "layer_scalar", "mlp.router.correction")
"""Those whose Hugging Face names have no ending."""
_SPECIAL = {
    "exaone4": _POST_NORMS,
    "falcon-h1": _MAMBA,
    "glm4": _GLM4,
    "gemma2": _POST_NORMS,
    "gemma3": _POST_NORMS,
    "gemma4": _GEMMA4,
    "granitehybrid": _MAMBA,
    "nemotron_h": _MAMBA,
    "olmo2": _POST_NORMS,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "qwen35": _DELTA_RULE,
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
}
_FLAT = ("linear_attn.A_log", "linear_attn.D", "linear_attn.norm.weight")
"""Vectors that files of Mamba-2 have in two dimensions."""
_ROW_BYTES = 8192
_XIELU = ("alpha_p", "alpha_n", "beta", "eps")
# llama.cpp stores q and k of these with interleaved rotary pairs; Hugging Face splits a head into halves.
_INTERLEAVED = frozenset({"arcee", "llama", "granite", "granitemoe", "olmo", "smollm3"})


@dataclass(frozen=True, slots=True)
class GgufTensor(ComputedTensor):
    """A tensor of a GGUF file.

    Attributes:
        file: the file.
        shape: dimensions, `[out, in]` for a matrix.
        block: what is stored.
        pairs: rows of a head if its rotary pairs are interleaved in the file; 0 if the rows are in order.
        order: the place in the file of each row, or of each column; None if they are in order.
        by_columns: whether `order` is that of columns.
        is_rate: whether the file holds minus the exponential of what Hugging Face stores.
    """

    file: Path
    shape: tuple[int, ...]
    block: Block
    pairs: int = 0
    order: NDArray[np.int64] | None = None
    by_columns: bool = False
    is_rate: bool = False

    def read(self, rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        """Some rows, dequantized to float32."""
        places: slice | NDArray[np.int64] = rows
        if self.pairs:
            places = _interleaved(np.arange(self.shape[0])[rows], self.pairs)
        elif self.order is not None and not self.by_columns:
            places = self.order[rows]
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType[self.block.type]
        stored = np.ascontiguousarray(self.block.data[places])
        values: NDArray[np.float32] = dequantize(_with_long_rows(stored), kind)
        values = values.reshape(-1, *self.shape[1:])
        if self.order is not None and self.by_columns:
            values = values[:, self.order]
        if self.is_rate:
            values = np.log(-values)
        return values if values.flags.writeable else values.copy()


def _with_long_rows(stored: NDArray[Any]) -> NDArray[Any]:
    """The same blocks in fewer rows: gguf dequantizes 16 at a time, and short ones take it twice the time."""
    rows = stored.reshape(-1, stored.shape[-1])
    joined = max(1, min(len(rows), _ROW_BYTES // max(rows.shape[1], 1)))
    while len(rows) % joined:
        joined -= 1
    return rows.reshape(len(rows) // joined, -1) if len(rows) else stored


@dataclass(frozen=True, slots=True)
class Number(ComputedTensor):
    """A number of a layer that stands in the metadata.

    Attributes:
        file: the file.
        value: the number.
        shape: `[1]`.
    """

    file: Path
    value: float
    shape: tuple[int, ...] = (1,)

    def read(self, rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        return np.array([self.value], np.float32)[rows]


def _numbers(file: GgufFile) -> dict[str, Number]:
    """What files of Apertus have in lists instead of in tensors."""
    layers, numbers = file.size(".block_count"), {}
    for name in _XIELU if file.architecture == "apertus" else ():
        key = f"xielu.{name}"
        values = file.entries(key)
        if len(values) != layers or not all(type(value) is float for value in values):
            raise file.refusal(key, f"a number for each of {layers} layers", values or None)
        for layer, value in enumerate(values):
            numbers[f"model.layers.{layer}.mlp.act_fn.{name}"] = Number(file.path, value)
    return numbers


def gguf_tensors(file: GgufFile) -> dict[str, ComputedTensor]:
    """Every tensor by its Hugging Face name.

    Raises:
        CheckpointError: a tensor is of an unknown type or has a name that the architecture does not have.
    """
    tensors: dict[str, ComputedTensor] = {**_numbers(file)}
    for name, block in file.blocks.items():
        if name in TENSORS:
            continue
        if block.type not in TYPES:
            raise CheckpointError(
                f"{file.path.name}: {name}",
                got=f"type {block.type}",
                expected=f"one of {', '.join(TYPES)}",
                fix="Take a file with one of these types; Q8_0 or F16 keep the most quality.",
            )
        if (experts := _of_experts(file, name, block)) is not None:
            tensors |= experts
            continue
        if (key := _name(file, name)) is None:
            continue
        shape = block.shape
        if key.endswith((".conv.conv.weight", ".conv1d.weight")) and len(shape) == 2:
            shape = shape[0], 1, shape[1]  # one input channel for each output channel
        if key.endswith(_FLAT) and len(shape) == 2:
            block = replace(block, data=block.data.reshape(-1), shape=(shape[0] * shape[1],))
            shape = block.shape
        tensors[key] = GgufTensor(
            block.file,
            shape,
            block,
            _head_rows(file, key),
            _tiled(file, key, shape),
            by_columns=key.endswith("linear_attn.out_proj.weight"),
            is_rate=key.endswith("linear_attn.A_log"),
        )
    return tensors


def _of_experts(file: GgufFile, name: str, block: Block) -> dict[str, GgufTensor] | None:
    """The matrices of each expert in a tensor `[E, rows, in]` of all; None if it is another one.

    Raises:
        CheckpointError: it has other axes.
    """
    match = _LAYER.fullmatch(name)
    projections = _EXPERTS.get(match[2]) if match else None
    if match is None or projections is None:
        return None
    count, width = file.size(".expert_count"), block.shape[-1]
    if match[3] != "weight" or len(block.shape) != 3 or block.shape[0] != count or block.shape[1] % len(projections):
        raise CheckpointError(
            f"{file.path.name}: {name}",
            got=f"shape {list(block.shape)}",
            expected=f"the matrices of {count} experts, as expert_count says",
            fix="Convert the model again with a current llama.cpp, or start from its safetensors.",
        )
    rows = block.shape[1] // len(projections)
    tensors = {}
    for expert, matrices in enumerate(block.data):
        for place, projection in enumerate(projections):
            own = Block(matrices[place * rows : (place + 1) * rows], block.type, (rows, width), block.file)
            key = f"model.layers.{match[1]}.{expert_projection(expert, projection)}.weight"
            tensors[key] = GgufTensor(block.file, own.shape, own)
    return tensors


def _name(file: GgufFile, name: str) -> str | None:
    """The Hugging Face name of a tensor; None if it belongs to no layer of the decoder."""
    if name in _TABLES:
        return _TABLES[name]
    match = _LAYER.fullmatch(name)
    layers = file.size(".block_count")
    if match and layers - further_layers(file) <= int(match[1]) < layers:
        return None
    part = (_PARTS | _SPECIAL.get(file.architecture, {})).get(match[2]) if match else None
    if match and file.architecture == "nemotron_h" and f"blk.{match[1]}.ffn_up.weight" in file.blocks:
        part = "post_attention_layernorm" if match[2] == "attn_norm" else part  # the only norm of a layer has this name
    if match is None or part is None:
        raise CheckpointError(
            f"{file.path.name}: {name}",
            got="a tensor that edgekv does not know",
            expected=f"the tensors of the architecture {file.architecture}",
            fix="Merge adapters first; experts that all tokens share and other architectures cannot be exported.",
        )
    # A norm of Falcon-H1 has no ending.
    return f"model.layers.{match[1]}.{part}" + ("" if part in _VECTORS else f".{match[3] or 'weight'}")


def _tiled(file: GgufFile, key: str, shape: tuple[int, ...]) -> NDArray[np.int64] | None:
    """Where the file has each row or column of the values of gated delta rules; None if they are in order.

    Hugging Face stores the value heads of a key head together, llama.cpp the first ones of all key heads, then the
    second ones.
    """
    if file.architecture != "qwen35" or ".linear_attn." not in key or key.endswith("linear_attn.norm.weight"):
        return None
    keys, values = file.size(".ssm.group_count"), file.size(".ssm.time_step_rank")
    if values % keys:
        raise file.refusal(".ssm.time_step_rank", f"a multiple of ssm.group_count, {keys}", values)
    size = shape[1] if key.endswith("linear_attn.out_proj.weight") else shape[0]
    before = 2 * keys * file.size(".ssm.state_size") if key.endswith(("in_proj_qkv.weight", "conv1d.weight")) else 0
    width = (size - before) // values
    heads = np.arange(values).reshape(values // keys, keys).T.reshape(-1)
    places = before + (heads[:, None] * width + np.arange(width)).reshape(-1)
    order: NDArray[np.int64] = np.concatenate([np.arange(before), places])
    return order


def _head_rows(file: GgufFile, key: str) -> int:
    """Rows of a head if its rotary pairs are interleaved, else 0."""
    if file.architecture in _INTERLEAVED and re.search(r"\.self_attn\.[qk]_proj\.", key):
        heads = file.shared_size(".attention.head_count", file.size(".block_count"))
        return file.size(".attention.key_length", file.size(".embedding_length") // heads)
    return 0


def _interleaved(rows: NDArray[Any], head: int) -> NDArray[np.int64]:
    """Indices of the rows of both halves among interleaved pairs: element i of half j is row 2 i + j of its head."""
    within = rows % head
    half = head // 2
    places: NDArray[np.int64] = rows - within + 2 * (within % half) + within // half
    return places
