"""Vision encoders of random weights, and tiny configurations of each family for conformance kits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from numpy.typing import NDArray

from edgekv.bundle import ENCODER
from edgekv.machine.tensor_file import encode_tensors
from edgekv.pictures import cut_tiles, encoder_inputs, graph_inputs
from edgekv.spec import ENCODERS, LAYER_TABLE, LAYER_TABLE_NORM, LAYER_TABLE_PROJECTION, PIXELS_PORT, Config
from exporters.checkpoint.vision import VisionEncoder
from exporters.graphs.encoder import QdqEncoder
from exporters.graphs.weights import ShardWriter
from exporters.quantize.encoder import quantize_encoder
from exporters.quantize.pictures import drawn_picture

_TEXT = {"hidden_size": 64, "num_hidden_layers": 4}
_VISION = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_QWEN = {"depth": 3, "num_heads": 4, "patch_size": 8}
_SQUARE = {"height": 32, "width": 32}
_BOUND = 4.0
"""Of what matrices read and write, where they have bounds."""
_CALIBRATION = 2
"""Pictures."""

KINDS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"mm_tokens_per_image": 4, "vision_config": {**_VISION, "image_size": 32, "patch_size": 8}},
        {"size": _SQUARE, "resample": 2},
    ),
    "gemma4": (
        {
            "text_config": {**_TEXT, "hidden_size_per_layer_input": 16},
            "vision_config": {
                **_VISION,
                "num_key_value_heads": 2,
                "head_dim": 12,
                "patch_size": 4,
                "use_clipped_linears": True,
            },
        },
        {"patch_size": 4, "max_soft_tokens": 16, "do_normalize": False},
    ),
    "internvl": (
        {"vision_config": {**_VISION, "attention_bias": True, "image_size": [32, 32], "patch_size": [8, 8]}},
        {"size": _SQUARE, "resample": 3},
    ),
    "lfm2_vl": (
        {"projector_hidden_size": 80, "vision_config": {**_VISION, "num_patches": 16, "patch_size": 8}},
        {"tile_size": 32, "encoder_patch_size": 8, "min_image_tokens": 1, "max_image_tokens": 4},
    ),
    "qwen2_vl": (
        {"vision_config": {**_QWEN, "embed_dim": 48, "mlp_ratio": 2, "hidden_size": 64}},
        {"patch_size": 8, "min_pixels": 256, "max_pixels": 2048},
    ),
    "qwen2_5_vl": (
        {
            "vision_config": {
                **_QWEN,
                "hidden_size": 48,
                "intermediate_size": 96,
                "out_hidden_size": 64,
                "window_size": 32,
                "fullatt_block_indexes": [1],
            }
        },
        {"patch_size": 8, "min_pixels": 256, "max_pixels": 2048},
    ),
    "qwen3_vl": (
        {
            "vision_config": {
                **_QWEN,
                "hidden_size": 48,
                "intermediate_size": 96,
                "out_hidden_size": 64,
                "num_position_embeddings": 25,
                "deepstack_visual_indexes": [0, 1],
            }
        },
        {"patch_size": 8, "size": {"shortest_edge": 256, "longest_edge": 2048}},
    ),
}
"""What `config.json` and `preprocessor_config.json` have beside `model_type`, by the modules of `spec.encoders`."""
OF_MODEL = ("smolvlm",)
"""Families whose encoder a kit has of a model in the repository."""


@dataclass(frozen=True)
class RandomTensor:
    """A random tensor of a checkpoint: a matrix that keeps the size of its inputs, a norm, a bias or a bound."""

    name: str
    shape: tuple[int, ...]
    file: Path = Path("random")

    def read(self, rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        """Some rows."""
        if self.name.endswith(("_min", "_max")):
            return np.array([-_BOUND if self.name.endswith("min") else _BOUND], np.float32)
        random = np.random.default_rng([3, *self.name.encode()])
        width = int(np.prod(self.shape[1:])) if len(self.shape) > 1 else 0
        values = random.standard_normal(self.shape, np.float32)
        if width > 1:
            return values[rows] / np.float32(width**0.5)
        return values[rows] * np.float32(0.2) + np.float32("norm" in self.name and self.name.endswith("weight"))

    def largest(self) -> float:
        """The largest magnitude, as far as a check needs it."""
        return 1.0

    def count_not_finite(self) -> int:
        """None is."""
        return 0


def random_encoder(config: Config, processor: Config) -> VisionEncoder:
    """An encoder of random weights, as a checkpoint of these configurations has it."""
    family = ENCODERS[config.text("model_type")]
    spec = family.describe(config, processor)
    empty = VisionEncoder(spec, family.pictures(config, processor), None, family.names, {})
    shapes = empty.shapes
    if (rows := spec.layer_rows) is not None:
        shapes |= {LAYER_TABLE: (rows.token + 1, rows.elements), LAYER_TABLE_NORM: (rows.width,)}
        shapes[LAYER_TABLE_PROJECTION] = rows.elements, spec.output
    encoder = replace(empty, _tensors={name: RandomTensor(name, shape) for name, shape in shapes.items()})
    return replace(encoder, spec=msgspec.structs.replace(spec, bounds=encoder.bounds)) if spec.clipped else encoder


def kind_encoder(name: str) -> VisionEncoder:
    """The tiny encoder of a family; see `KINDS`."""
    fields, prepared = KINDS[name]
    return random_encoder(Config({"model_type": name, "text_config": _TEXT, **fields}), Config(prepared))


def write_kind(name: str, folder: Path, cases: int) -> tuple[Path, Path]:
    """Write the graph of a tiny encoder, calibrated on drawn pictures, and inputs of it: other pictures, and noise.

    Args:
        name: of the family.
        folder: to be made.
        cases: of inputs; the pixels of the last are noise.

    Returns:
        The graph, and a safetensors file of `in.CASE.NAME`.
    """
    folder.mkdir(parents=True)
    vision = kind_encoder(name)
    spec, sizes = vision.spec, [(vision.spec.image, vision.spec.image * 3 // 4), (vision.spec.image,) * 2]
    shown = [
        encoder_inputs(
            cut_tiles(drawn_picture(number, max(size))[: size[1], : size[0]], vision.pictures, spec.image).tiles[-1],
            spec,
            vision.pictures,
        )
        for number, size in enumerate(sizes[at % 2] for at in range(_CALIBRATION + cases))
    ]
    quantized = quantize_encoder(vision, vision.pictures, shown[:_CALIBRATION])
    store = ShardWriter(vision.tensor, vision.head_width, quantized.matrices)
    graph = QdqEncoder(spec, quantized.encodings, store)
    outputs = graph.build()
    store.write(folder / f"weights-{ENCODER}.safetensors")
    onnx.save(graph.finish(outputs), folder / f"{ENCODER}.onnx")
    arrays = dict[str, NDArray[np.generic]]()
    for case, picture in enumerate(shown[_CALIBRATION:]):
        for port, values in graph_inputs(picture, spec, quantized.encodings).items():
            if port == PIXELS_PORT and case == cases - 1:
                limits = np.iinfo(values.dtype)
                random = np.random.default_rng(7)
                values = random.integers(limits.min, limits.max, values.shape, values.dtype, endpoint=True)
            arrays[f"in.{case}.{port}"] = values
    file = folder / "inputs.safetensors"
    file.write_bytes(encode_tensors(arrays))
    return folder / f"{ENCODER}.onnx", file
