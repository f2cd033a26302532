"""A decoder as onnxruntime-genai's model builder writes it for a CPU with int4 weights, without PyTorch.

The builder (`python -m onnxruntime_genai.models.builder -p int4 -e cpu`) needs PyTorch and Transformers. This graph has
the same operations in the same order: `MatMulNBits` with blocks of 32 and accuracy level 4 for all matrices including
the head, one matrix for queries, keys and values, `GroupQueryAttention` with rotary embedding inside,
`SkipSimplifiedLayerNormalization`, a float embedding table. The integers are random: speed does not depend on them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgekv.bundle import Bundle
from edgekv.spec import DecoderSpec
from exporters.checkpoint.checkpoint import Checkpoint

_BLOCK_ROWS = 32
_CONTRIB = "com.microsoft"


class _Writer:
    """Nodes and constants of a graph."""

    def __init__(self, spec: DecoderSpec) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(0)
        self._spec = spec

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, outputs, outputs[0], domain=domain, **attributes))
        return outputs[0]

    def constant(self, name: str, array: NDArray[Any]) -> str:
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def linear(self, x: str, name: str, rows: int, columns: int) -> str:
        blocks = -(-rows // _BLOCK_ROWS)
        integers = self._random.integers(0, 256, (columns, blocks, _BLOCK_ROWS // 2)).astype(np.uint8)
        scales = self._random.uniform(0.5, 1.5, columns * blocks).astype(np.float32) / (8 * np.float32(rows) ** 0.5)
        weights = [self.constant(f"{name}.q", integers), self.constant(f"{name}.s", scales)]
        attributes = {"K": rows, "N": columns, "bits": 4, "block_size": _BLOCK_ROWS, "accuracy_level": 4}
        return self.node("MatMulNBits", [x, *weights], [name], _CONTRIB, **attributes)

    def norm(self, x: str, skip: str | None, name: str) -> tuple[str, str]:
        """The normalized sum, and the sum."""
        gamma = self.constant(f"{name}.g", np.ones(self._spec.hidden, np.float32))
        if skip is None:
            attributes = {"axis": -1, "epsilon": self._spec.eps, "stash_type": 1}
            return self.node("SimplifiedLayerNormalization", [x, gamma], [name], **attributes), x
        outputs = [name, "", "", f"{name}.sum"]
        self.node("SkipSimplifiedLayerNormalization", [x, skip, gamma], outputs, _CONTRIB, epsilon=self._spec.eps)
        return name, f"{name}.sum"


def spec_of(bundle: Bundle) -> DecoderSpec:
    """The decoder of a bundle's checkpoint."""
    return Checkpoint.open(bundle.manifest.source.checkpoint).spec


def write_genai_folder(spec: DecoderSpec, context: int, folder: Path) -> Path:
    """Write `model.onnx` and `genai_config.json`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model = _model(spec, context)
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    (folder / "genai_config.json").write_text(json.dumps(_config(spec, context), indent=1))
    return folder


def _model(spec: DecoderSpec, context: int) -> onnx.ModelProto:
    writer, width = _Writer(spec), spec.head_dim
    random = np.random.default_rng(1)
    table = random.normal(size=(spec.vocab, spec.hidden)).astype(np.float32)
    hidden = writer.node("Gather", [writer.constant("table", table), "input_ids"], ["embedded"])
    lengths = writer.node("ReduceSum", ["attention_mask", writer.constant("one", np.array([1]))], ["lengths"])
    last = writer.node("Sub", [lengths, writer.constant("one.less", np.array([[1]]))], ["last"])
    seqlens = writer.node("Cast", [last], ["seqlens_k"], to=TensorProto.INT32)
    shape = writer.node("Shape", ["attention_mask"], ["shape"])
    total = writer.node("Gather", [shape, writer.constant("index", np.array(1))], ["total.long"])
    total = writer.node("Cast", [total], ["total"], to=TensorProto.INT32)
    angles = np.outer(np.arange(context), 10000.0 ** (-np.arange(width // 2) * 2 / width)).astype(np.float32)
    rotary = [writer.constant("cos_cache", np.cos(angles)), writer.constant("sin_cache", np.sin(angles))]
    added: str | None = None
    for layer in range(spec.layers):
        at = f"layers.{layer}."
        x, hidden = writer.norm(hidden, added, at + "attention_norm")
        heads = spec.heads + 2 * spec.kv_heads
        qkv = writer.linear(x, at + "qkv", spec.hidden, heads * width)
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        present = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        attended = writer.node(
            "GroupQueryAttention",
            [qkv, "", "", *past, seqlens, total, *rotary],
            [at + "attention", *present],
            _CONTRIB,
            num_heads=spec.heads,
            kv_num_heads=spec.kv_heads,
            scale=width**-0.5,
            do_rotary=1,
            rotary_interleaved=0,
        )
        added = writer.linear(attended, at + "o", spec.heads * width, spec.hidden)
        x, hidden = writer.norm(hidden, added, at + "mlp_norm")
        gate = writer.linear(x, at + "gate", spec.hidden, spec.intermediate)
        up = writer.linear(x, at + "up", spec.hidden, spec.intermediate)
        sigmoid = writer.node("Sigmoid", [gate], [at + "sigmoid"])
        active = writer.node("Mul", [gate, sigmoid], [at + "silu"])
        inner = writer.node("Mul", [active, up], [at + "mlp"])
        added = writer.linear(inner, at + "down", spec.intermediate, spec.hidden)
    x, _ = writer.norm(hidden, added, "final_norm")
    writer.linear(x, "logits", spec.hidden, spec.vocab)
    caches = [f"{layer}.{kind}" for layer in range(spec.layers) for kind in ("key", "value")]
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "new"]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]),
        *(_cache(f"past_key_values.{name}", spec, "past") for name in caches),
    ]
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "new", spec.vocab]),
        *(_cache(f"present.{name}", spec, "total") for name in caches),
    ]
    graph = helper.make_graph(writer.nodes, "decoder", inputs, outputs, writer.constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(_CONTRIB, 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return model


def _cache(name: str, spec: DecoderSpec, rows: str) -> onnx.ValueInfoProto:
    shape = ["batch", spec.kv_heads, rows, spec.head_dim]
    value: onnx.ValueInfoProto = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    return value


def _config(spec: DecoderSpec, context: int) -> dict[str, Any]:
    cache = {"key": "past_key_values.%d.key", "value": "past_key_values.%d.value"}
    return {
        "model": {
            "type": "llama",
            "context_length": context,
            "vocab_size": spec.vocab,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": "model.onnx",
                "head_size": spec.head_dim,
                "hidden_size": spec.hidden,
                "num_attention_heads": spec.heads,
                "num_key_value_heads": spec.kv_heads,
                "num_hidden_layers": spec.layers,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": cache["key"],
                    "past_value_names": cache["value"],
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"max_length": context, "min_length": 0, "do_sample": False, "past_present_share_buffer": True},
    }
