"""The vision encoder of a checkpoint, with its norms, biases and the mean of the residual folded into its matrices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.errors import CheckpointError, UsageError
from edgekv.pictures import block_order
from edgekv.spec import (
    CENTER,
    LAST_NORM,
    LAST_NORM_BIAS,
    LAYER_ROWS,
    LAYER_ROWS_BIAS,
    LAYER_ROWS_NORM,
    LAYER_TABLE,
    LAYER_TABLE_NORM,
    LAYER_TABLE_PROJECTION,
    MERGED_MEANS,
    PATCHES,
    PATCHES_BIAS,
    POSITIONS,
    PROJECTOR,
    PROJECTOR_BIAS,
    PROJECTOR_OUT,
    PROJECTOR_OUT_BIAS,
    TABLE,
    Bound,
    Config,
    DecoderSpec,
    EncoderSpec,
    PictureSpec,
    bias_of,
    by_inputs,
    deepstack_fc2,
    encoder_family,
    encoder_tensor,
    mean_of,
    text_tensor,
)
from edgekv.spec.encoders.names import EncoderNames
from edgekv.spec.encoders.processor import read_processor
from edgekv.spec.harmless import ENCODER, PROCESSOR
from exporters.checkpoint.check_tensors import renamed
from exporters.checkpoint.fold import EVERY, Floats
from exporters.checkpoint.stored import CheckpointTensor
from quant import quantize_per_channel

MAX_PATCHES = 4096
"""Of a picture."""

_LAYER = re.compile(r"vision\.layers\.(\d+)\.(.+)")
_GEMMA_PARTS = "up", "q_norm", "k_norm", "attention_out_norm", "mlp_out_norm"
_CLIPPED = {
    **{f"{kind}_proj": (f"attention_norm.{kind}", f"{kind}.projected") for kind in "qkv"},
    "o_proj": ("attention", "o_proj"),
    "fc1": ("mlp_norm.fc1", "fc1"),
    "up": ("mlp_norm.up", "up"),
    "fc2": ("gated", "fc2"),
}
"""The results that a matrix of a layer reads and writes, of which some checkpoints have bounds."""
_OF_LAYER_ROWS = LAYER_TABLE, LAYER_TABLE_PROJECTION, LAYER_TABLE_NORM
_INNER = "fc1", "up"
"""Matrices whose results have the width of the feed-forward."""
_QUICK = 1.702
"""`x * sigmoid(1.702 x)` is nearly GELU (arXiv 1606.08415)."""
_FARTHEST = float(np.finfo(np.float32).max)
_DEEPSTACK = re.compile(r"vision\.deepstack\.(\d+)\.(fc[12])\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class VisionEncoder:
    """The vision encoder of an open checkpoint.

    Attributes:
        spec: its sizes.
        pictures: how pictures become its inputs.
        decoder: what it changes in the decoder, if it does.
        names: of the stored tensors.
    """

    spec: EncoderSpec
    pictures: PictureSpec
    decoder: Callable[[DecoderSpec], DecoderSpec] | None = field(repr=False)
    names: EncoderNames = field(repr=False)
    _tensors: Mapping[str, CheckpointTensor] = field(repr=False)

    @classmethod
    def open(
        cls, config: Mapping[str, Any], folder: Path, tensors: Mapping[str, CheckpointTensor]
    ) -> VisionEncoder | None:
        """The encoder of a checkpoint; None if its architecture has none that can be exported, or the
        files are those of the decoder alone.

        Args:
            config: the content of `config.json`.
            folder: of the checkpoint.
            tensors: by their stored names.

        Raises:
            CheckpointError: a field or a tensor is missing, contradictory or not supported.
        """
        fields = Config(config)
        family = encoder_family(fields)
        if family is None:
            return None
        decoder_tensors, tensors = tensors, renamed(tensors, encoder_tensor)
        if tensors.keys().isdisjoint({family.names.patches + ".weight", family.names.projector_weight}):
            return None
        processor = read_processor(folder)
        spec = family.describe(fields, processor)
        if spec.layer_rows is not None:
            of_decoder = renamed(decoder_tensors, text_tensor)
            tensors |= {name: of_decoder[name] for name in _OF_LAYER_ROWS if name in of_decoder}
        decoder = None if family.decoder is None else partial(family.decoder, fields)
        encoder = cls(spec, family.pictures(fields, processor), decoder, family.names, tensors)
        fields.table("vision_config").check_read(ENCODER)
        processor.check_read(PROCESSOR)
        for name, shape in encoder.shapes.items():
            stored = tensors.get(name)
            if stored is None or stored.shape != shape:
                raise CheckpointError(
                    f"weights: {name}",
                    got="no such tensor" if stored is None else f"shape {list(stored.shape)}",
                    expected=f"shape {list(shape)}, as vision_config of config.json says",
                    fix="The weights and config.json do not belong together; fetch both again.",
                )
        return replace(encoder, spec=msgspec.structs.replace(spec, bounds=encoder.bounds)) if spec.clipped else encoder

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """Those of what the matrices of layers read and write."""
        bounds = list[Bound]()
        for layer in range(self.spec.layers):
            for matrix, (read, written) in _CLIPPED.items():
                stored = self._gemma_names[matrix].format(layer=layer).removesuffix("linear")
                for kind, result in (("input", read), ("output", written)):
                    ends = [float(self._stored(f"{stored}{kind}_{end}").reshape(())) for end in ("min", "max")]
                    if not ends[0] < 0 < ends[1]:
                        got, expected = f"{ends[0]:g} to {ends[1]:g}", "a minimum below 0 and a maximum above it"
                        fix = "The file is damaged: use another checkpoint."
                        raise CheckpointError(f"weights: {stored}{kind}_min", got=got, expected=expected, fix=fix)
                    low, high = np.clip(ends, -_FARTHEST, _FARTHEST).tolist()
                    bounds.append(Bound(name=f"vision.layers.{layer}.{result}", low=low, high=high))
        return tuple(bounds)

    @property
    def _bound_tensors(self) -> set[str]:
        """The stored names of bounds, which may be infinite."""
        return {name for name, shape in self.shapes.items() if self.spec.clipped and shape == (1,)}

    def with_sizes(self, sizes: Sequence[tuple[int, int]]) -> VisionEncoder:
        """The encoder for pictures of some widths and heights alone, in pixels; for none, as it is.

        Raises:
            UsageError: it has tiles of one size, or a size is no whole number of rows, or has too many.
        """
        if not sizes:
            return self
        field, shapes, step = "--picture-sizes", self.pictures.shapes, self.spec.patch * self.spec.merge
        if shapes is None or self.pictures.tiling != "none":
            got, expected = f"it for {self.spec.model_type}", "a checkpoint that reads whole pictures, such as Qwen3-VL"
            raise UsageError(field, got=got, expected=expected, fix="Leave it out.")
        for width, height in sizes:
            if width % step or height % step:
                near = "x".join(str(max(round(edge / step), 1) * step) for edge in (width, height))
                raise UsageError(
                    field, got=f"{width}x{height}", expected=f"multiples of {step} pixels", fix=f"Use {near}."
                )
        patches = max(width * height for width, height in sizes) // self.spec.patch**2
        if patches > MAX_PATCHES:
            expected = f"at most {MAX_PATCHES * self.spec.patch**2:,} pixels"
            raise UsageError(field, got=f"{patches:,} patches", expected=expected, fix="Use smaller sizes.")
        rows = patches // self.spec.merged
        windows = max(shapes.windows_of(width, height) for width, height in sizes)
        shapes = msgspec.structs.replace(shapes, least=min(shapes.least, rows), most=rows, windows=windows)
        pictures = msgspec.structs.replace(self.pictures, sizes=tuple(sizes), shapes=shapes)
        spec = msgspec.structs.replace(self.spec, max_patches=patches, windows=shapes.windows, image=shapes.square)
        if spec.interpolation == "summed":
            side, stored = max(map(max, sizes)) // spec.patch, self._tensors[self.names.positions].shape[1]
            if side > stored:
                got, expected = f"an edge of {side * spec.patch} pixels", f"at most {stored * spec.patch}"
                raise UsageError(field, got=got, expected=expected, fix="Use smaller sizes.")
            spec = msgspec.structs.replace(spec, table_side=side)
        return replace(self, spec=spec, pictures=pictures)

    @property
    def files(self) -> set[Path]:
        """The files of its tensors."""
        return {self._tensors[name].file for name in self.shapes}

    def check_values(self) -> None:
        """Reject values that no graph can represent.

        Raises:
            CheckpointError: naming a tensor with elements that are NaN or infinite.
        """
        for name in self.shapes.keys() - self._bound_tensors:
            if not np.isfinite(self._tensors[name].largest()):
                fix = "The training or a conversion diverged, or the file is damaged: use another checkpoint."
                raise CheckpointError(f"weights: {name}", got="NaN or infinite", expected="finite numbers", fix=fix)

    def head_width(self, name: str) -> int:
        """Width of the heads of a projection."""
        return self.spec.head_dim

    def tensor(self, name: str) -> Floats:
        """A tensor under its name in `EncoderSpec`, with all that is folded into it; matrices are `[out, in]`.

        What is normalized has the mean 0, so matrices that read it have the norm's weights as factors of their inputs,
        and its biases in their own.
        """
        if self.spec.gemma_layers:
            return self._gemma(name)
        if name == MERGED_MEANS:
            return (np.eye(self.spec.merged) - 1 / self.spec.merged).astype(np.float32)
        if "_mean." in name:
            return self._means(name)
        if name == CENTER:
            return np.full(self.spec.matrices[CENTER], -1 / self.spec.matrices[CENTER][1], np.float32)
        if name in (LAST_NORM, LAST_NORM_BIAS):
            return (self._weight if name == LAST_NORM else self._bias)(_named(self.names.last_norm))
        if (merger := _DEEPSTACK.fullmatch(name)) is not None:
            return self._deepstack(int(merger[1]), merger[2], merger[3])
        entry = (PATCHES, POSITIONS, PATCHES_BIAS, TABLE)
        if name in entry or name.endswith(("o_proj.weight", "o_proj.bias", "fc2.weight", "fc2.bias")):
            written = self._written(name)
            centered = written if self.spec.rms_norms else _centered(written)
            return centered.T if name == POSITIONS else centered
        if name == PROJECTOR:
            return self._projector() * self._folded("weight")
        if name == PROJECTOR_BIAS and self.spec.pooled:
            return np.zeros(self.spec.output, np.float32)
        if name == PROJECTOR_BIAS:
            bias: Floats = self._weight(self.names.projector) @ self._folded("bias")
            return bias if self.names.projector_out is None else bias + self._bias(self.names.projector)
        if name in (PROJECTOR_OUT, PROJECTOR_OUT_BIAS):
            assert self.names.projector_out is not None, "the projector has two matrices"
            return (self._weight if name == PROJECTOR_OUT else self._bias)(self.names.projector_out)
        match = _LAYER.fullmatch(name)
        assert match is not None, "a tensor of a layer"
        return self._layer(match[2], int(match[1]))

    def _gemma(self, name: str) -> Floats:
        """The same where layers are those of Gemma: RMS norms, so that nothing is centered, and no biases."""
        spec, names = self.spec, self.names
        if name in (LAYER_ROWS, LAYER_ROWS_NORM, LAYER_ROWS_BIAS):
            return self._layer_rows(name)
        if name == PATCHES:
            pixels = self._weight(names.patches).reshape(-1, spec.patch, spec.patch, 3)
            return pixels.transpose(0, 3, 1, 2).reshape(spec.hidden, -1)
        if name == TABLE:
            return self._stored(names.positions)[:, : spec.table_side].reshape(-1, spec.hidden).T
        if name == PROJECTOR:
            return self._weight(names.projector)
        match = _LAYER.fullmatch(name)
        assert match is not None, "a tensor of a layer"
        part, layer = match[2].removesuffix(".weight"), int(match[1])
        if part in ("attention_norm", "mlp_norm"):
            return self._weight(names.attention_norm if part == "attention_norm" else names.feed_forward_norm, layer)
        weight = self._weight(self._gemma_names[part], layer)
        if part[0] in "qk":  # halves of the width turn together; in checkpoints, those of each half do
            heads = weight.reshape(-1, 2, 2, spec.head_dim // 4, *weight.shape[1:])
            weight = heads[:, ::-1].swapaxes(1, 2).reshape(weight.shape)
        if part in ("k_proj", "v_proj") and spec.kv_heads is not None:
            heads = weight.reshape(spec.kv_heads, spec.head_dim, spec.hidden)
            weight = heads.repeat(spec.heads // spec.kv_heads, axis=0).reshape(spec.hidden, spec.hidden)
        if spec.clipped:
            return weight
        if part in ("q_proj", "k_proj", "v_proj"):
            return weight * self._weight(names.attention_norm, layer)
        return weight * self._weight(names.feed_forward_norm, layer) if part in ("fc1", "up") else weight

    def _layer_rows(self, name: str) -> Floats:
        """What turns rows into what layers of the decoder read: half of the square of that is the token's own."""
        rows, half = self.spec.layer_rows, np.float32(0.5**0.5)
        assert rows is not None, "an encoder of a decoder whose layers have inputs"
        if name == LAYER_ROWS:
            return self._stored(LAYER_TABLE_PROJECTION) * np.float32(self.spec.output**-0.5)
        if name == LAYER_ROWS_NORM:
            return self._stored(LAYER_TABLE_NORM) * half
        row: Floats = self._tensors[LAYER_TABLE].read(np.array([rows.token]))[0]
        return row * (half * np.float32(rows.width**0.5))

    @property
    def _gemma_names(self) -> dict[str, str]:
        """The stored names of the weights of a layer."""
        names = self.names
        assert names.gemma is not None, "an encoder with gemma_layers"
        stored = {"q_proj": names.q, "k_proj": names.k, "v_proj": names.v, "o_proj": names.o}
        return stored | {"fc1": names.fc1, "fc2": names.fc2} | dict(zip(_GEMMA_PARTS, names.gemma, strict=True))

    def _gemma_shapes(self) -> dict[str, tuple[int, ...]]:
        spec, names = self.spec, self.names
        table = self._tensors.get(names.positions)
        stored = table.shape[1] if table is not None and len(table.shape) == 3 else 0  # more than pictures need
        shapes: dict[str, tuple[int, ...]] = {
            names.patches + ".weight": (spec.hidden, spec.patch_values),
            names.positions: (2, max(stored, spec.table_side), spec.hidden),
            names.projector + ".weight": (spec.output, spec.hidden),
        }
        for layer in range(spec.layers):
            at = f"vision.layers.{layer}."
            for part, name in self._gemma_names.items():
                weight = f"{at}{part}.weight"
                shape = spec.matrices[weight] if weight in spec.matrices else spec.tensors[weight]
                if part in ("k_proj", "v_proj"):
                    shape = (spec.kv_heads or spec.heads) * spec.head_dim, spec.hidden
                shapes[name.format(layer=layer) + ".weight"] = shape
                if spec.clipped and part in _CLIPPED:
                    stem = name.format(layer=layer).removesuffix("linear")
                    ends = (f"{stem}{kind}_{end}" for kind in ("input", "output") for end in ("min", "max"))
                    shapes |= dict.fromkeys(ends, (1,))  # scalars
            for norm in (names.attention_norm, names.feed_forward_norm):
                shapes[norm.format(layer=layer) + ".weight"] = (spec.hidden,)
        return shapes

    def _projector(self) -> Floats:
        """The projector's matrix, `[out, in]`."""
        stored = self._stored(self.names.projector_weight)
        return stored.T if self.names.projector_inputs else stored

    def _deepstack(self, number: int, matrix: str, kind: str) -> Floats:
        """The matrices and biases of a merger behind a layer, with its norm in the first ones."""
        norm, fc1, fc2 = (name.format(number=number) for name in self._deepstack_names)
        if matrix == "fc2":
            return self._stored(f"{fc2}.{kind}")
        if kind == "weight":
            return self._weight(fc1) * self._weight(norm)
        return self._stored(fc1 + ".bias") + self._weight(fc1) @ self._stored(norm + ".bias")

    @property
    def _deepstack_names(self) -> tuple[str, str, str]:
        assert self.names.deepstack is not None, "the encoder has mergers behind layers"
        return self.names.deepstack

    def _positions(self) -> Floats:
        """What is added to each input, `[inputs, hidden]`: its position, and the bias of patches or the class."""
        spec, names = self.spec, self.names
        table, order = self._stored(names.positions), block_order(spec.side, spec.side, spec.merge)
        if names.class_row is None:
            at = _positions(spec) if names.bucketed else np.arange(spec.patches)
            return (table[at] + self._bias(names.patches))[order]
        own, patches = table[0, :1] + self._stored(names.class_row)[0], table[0, 1:] + self._bias(names.patches)
        return np.concatenate([patches[order], own])

    def _folded(self, kind: str) -> Floats:
        """The weights or biases of the norm before the projector, for each element of merged patches."""
        if self.spec.norms == "patches":
            read = self._weight if kind == "weight" else self._bias
            return np.tile(read(_named(self.names.last_norm)), self.spec.merged)
        if self.spec.pooled:
            return 1 + self._stored(f"{_named(self.names.merged_norm)}.{kind}")
        return self._stored(f"{_named(self.names.merged_norm)}.{kind}")

    def _means(self, name: str) -> Floats:
        """The mean of a tensor's outputs, as a tensor with one output; see `mean_of`."""
        means: Floats = self._written(name.replace("_mean.", ".")).mean(axis=0)
        if name == mean_of(POSITIONS):
            return means[:, None]
        return means[None] if name.endswith(".weight") else means.reshape(1)

    def _written(self, name: str) -> Floats:
        """What writes the residual, `[hidden, ...]`, before its mean is taken away; positions are transposed."""
        if name == PATCHES:
            weight, patch = self._weight(self.names.patches), self.spec.patch
            if self.names.frames:  # each of the same picture
                weight = weight.sum(axis=2)
            elif self.spec.has_shapes:  # a matrix of rows, columns and channels
                weight = weight.reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2)
            return weight.reshape(self.spec.hidden, -1)
        if name == PATCHES_BIAS:
            return self._bias(self.names.patches)
        if name == TABLE:
            return self._stored(self.names.positions).T
        if name == POSITIONS:
            return self._positions().T
        match = _LAYER.fullmatch(name)
        assert match is not None, "a tensor of a layer"
        return self._layer(match[2], int(match[1]))

    def _layer(self, part: str, layer: int) -> Floats:
        names, matrix, _, kind = self.names, *part.rpartition(".")
        reads = {"q_proj": names.q, "k_proj": names.k, "v_proj": names.v, "fc1": names.fc1, "up": names.up or ""}
        if matrix in reads:
            norm = names.feed_forward_norm if matrix in _INNER else names.attention_norm
            weight = self._own_part(self._weight(reads[matrix], layer), matrix)
            gain = self._quick if matrix in _INNER else np.float32(1)
            if kind == "weight":
                return weight * (self._weight(norm, layer) * gain)
            bias: Floats = self._own_part(self._bias(reads[matrix], layer), matrix) + weight @ self._bias(norm, layer)
            return bias * gain
        is_attention = matrix == "o_proj"
        writes, scale = (names.o, names.attention_scale) if is_attention else (names.fc2, names.feed_forward_scale)
        weight = self._weight(writes, layer)
        factors = np.ones(len(weight), np.float32) if scale is None else self._stored(scale, layer)
        if kind == "weight":
            return weight * (factors if is_attention else factors / self._quick)[:, None]
        bias = self._bias(writes, layer)
        if is_attention:  # shares of a patch sum to 1, so the bias of values reaches the result
            bias = bias + weight @ self._layer("v_proj.bias", layer)
        return bias * factors

    @property
    def _quick(self) -> np.float32:
        """The factor of what SiLU reads, by which its results are divided."""
        return np.float32(_QUICK if self.spec.feed_forward == "quick" else 1)

    def _own_part(self, fused: Floats, matrix: str) -> Floats:
        """The rows of queries, keys or values, if they are stored as one matrix."""
        if matrix in _INNER or not self.names.is_fused:
            return fused
        return fused[self.spec.hidden * "qkv".index(matrix[0]) :][: self.spec.hidden]

    def _weight(self, name: str, layer: int = 0) -> Floats:
        return self._stored(f"{name}.weight", layer)

    def _bias(self, name: str, layer: int = 0) -> Floats:
        if name in self._unbiased:
            return np.zeros(self.spec.hidden, np.float32)
        return self._stored(f"{name}.bias", layer)

    def _stored(self, name: str, layer: int = 0) -> Floats:
        return self._tensors[name.format(layer=layer)].read(EVERY)

    @property
    def _unbiased(self) -> tuple[str, ...]:
        """The projections and norms that checkpoints have no biases of; those of the width of the residual."""
        names = self.names
        inputs = () if self.spec.biased_inputs else (names.q, names.k, names.v)
        norms = (names.attention_norm, names.feed_forward_norm, _named(names.last_norm)) if self.spec.rms_norms else ()
        return *inputs, *norms

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the stored tensors."""
        if self.spec.gemma_layers:
            return self._gemma_shapes()
        spec, names = self.spec, self.names
        inner = spec.output if spec.projector_width is None else spec.projector_width
        positions = spec.table_side**2 if spec.has_shapes else spec.patches
        shapes: dict[str, tuple[int, ...]] = {
            names.patches + ".weight": (spec.hidden, 3, spec.patch, spec.patch),
            names.projector_weight: (inner, spec.merged_width),
        }
        if positions:
            shapes[names.patches + ".bias"] = (spec.hidden,)
            shapes[names.positions] = (1, spec.inputs, spec.hidden) if spec.has_class else (positions, spec.hidden)
        if names.projector_inputs:
            shapes[names.projector_weight] = spec.merged_width, inner
        if names.frames:
            shapes[names.patches + ".weight"] = spec.hidden, 3, names.frames, spec.patch, spec.patch
        elif spec.has_shapes:
            shapes[names.patches + ".weight"] = spec.hidden, spec.patch_values
        if names.class_row is not None:
            shapes[names.class_row] = 1, 1, spec.hidden
        if names.projector_out is not None:
            shapes |= {names.projector + ".bias": (inner,), names.projector_out + ".bias": (spec.output,)}
            shapes[names.projector_out + ".weight"] = spec.output, inner
        norms = list[str]()
        for layer in range(spec.layers):
            norms += [pattern.format(layer=layer) for pattern in (names.attention_norm, names.feed_forward_norm)]
            for name, shape in {
                **dict.fromkeys((names.q, names.k, names.v), (spec.hidden * (3 if names.is_fused else 1), spec.hidden)),
                names.o: (spec.hidden, spec.hidden),
                names.fc1: (spec.intermediate, spec.hidden),
                **({} if names.up is None else {names.up: (spec.intermediate, spec.hidden)}),
                names.fc2: (spec.hidden, spec.intermediate),
            }.items():
                shapes[name.format(layer=layer) + ".weight"] = shape
                if name not in self._unbiased:
                    shapes[name.format(layer=layer) + ".bias"] = shape[:1]
            for scale in filter(None, (names.attention_scale, names.feed_forward_scale)):
                shapes[scale.format(layer=layer)] = (spec.hidden,)
        kinds = ("weight",) if spec.rms_norms else ("weight", "bias")
        shapes |= {f"{norm}.{kind}": (spec.hidden,) for norm in norms for kind in kinds}
        for kind in kinds:
            if spec.norms != "merged":
                shapes[f"{_named(names.last_norm)}.{kind}"] = (spec.hidden,)
            if spec.norms != "patches" and not (spec.pooled and kind == "bias"):
                shapes[f"{_named(names.merged_norm)}.{kind}"] = (spec.merged_width,)
        width = spec.hidden * spec.merged
        for number in range(len(spec.deepstack)):
            norm, fc1, fc2 = (name.format(number=number) for name in self._deepstack_names)
            shapes |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,), f"{fc1}.weight": (width, width)}
            shapes |= {f"{fc1}.bias": (width,), f"{fc2}.weight": (spec.output, width), f"{fc2}.bias": (spec.output,)}
        return shapes


@dataclass(frozen=True, slots=True)
class WideEncoder:
    """An encoder some of whose matrices are two: rounded to 8 bits, and what that leaves.

    Attributes:
        encoder: the encoder, with one of each.
        wide: their names.
    """

    encoder: VisionEncoder | RotatedEncoder
    wide: tuple[str, ...]

    @property
    def spec(self) -> EncoderSpec:
        """With the names."""
        return msgspec.structs.replace(self.encoder.spec, wide=self.wide)

    def tensor(self, name: str) -> Floats:
        """As `VisionEncoder.tensor`."""
        high = name.replace("_low.weight", ".weight")
        values = self.encoder.tensor(high)
        if high not in self.wide:
            return values
        rounded = quantize_per_channel(by_inputs(values)).dequantize().T
        return rounded if name == high else values - rounded


@dataclass(frozen=True, slots=True)
class RotatedEncoder:
    """An encoder whose rows are in the basis of a decoder with a rotated residual.

    Attributes:
        encoder: the encoder.
        write: rotates the outputs of a matrix or bias that writes the decoder's residual.
    """

    encoder: VisionEncoder
    write: Callable[[Floats], Floats]

    @property
    def spec(self) -> EncoderSpec:
        """Its sizes."""
        return self.encoder.spec

    def tensor(self, name: str) -> Floats:
        """As `VisionEncoder.tensor`."""
        values = self.encoder.tensor(name)
        last = {PROJECTOR_OUT if self.spec.projector == "mlp" else PROJECTOR}
        last |= {*map(deepstack_fc2, range(len(self.spec.deepstack)))}
        return self.write(values) if name in last | {*map(bias_of, last)} else values


def _positions(spec: EncoderSpec) -> NDArray[np.int64]:
    """The row of the position table for each patch, as SigLIP for any resolution finds it, in float32."""
    step = np.float32(1 / spec.side)
    places = np.minimum(np.arange(spec.side, dtype=np.float32) * step, np.float32(1 - 1e-6))
    bounds = np.arange(1 / spec.side, 1.0, 1 / spec.side).astype(np.float32)
    at = np.searchsorted(bounds, places, side="right")
    return (at[:, None] * spec.side + at).reshape(-1)


def _centered(outputs: Floats) -> Floats:
    """A matrix `[out, ...]` or a bias `[out]` whose results have the mean 0."""
    centered: Floats = outputs - outputs.mean(axis=0)
    return centered


def _named(name: str | None) -> str:
    assert name is not None, "the encoder has this norm"
    return name
