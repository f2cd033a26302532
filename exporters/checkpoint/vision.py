"""The vision encoder of a checkpoint, with its norms, biases and the mean of the residual folded into its matrices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.errors import CheckpointError
from edgekv.pictures import block_order
from edgekv.spec import (
    CENTER,
    ENCODERS,
    LAST_NORM,
    LAST_NORM_BIAS,
    MERGED_MEANS,
    PATCHES,
    PATCHES_BIAS,
    POSITIONS,
    PROJECTOR,
    PROJECTOR_BIAS,
    PROJECTOR_OUT,
    PROJECTOR_OUT_BIAS,
    TABLE,
    Config,
    EncoderSpec,
    PictureSpec,
    by_inputs,
    encoder_tensor,
    mean_of,
)
from edgekv.spec.encoders.names import EncoderNames
from edgekv.spec.encoders.processor import read_processor
from edgekv.spec.harmless import ENCODER, PROCESSOR
from exporters.checkpoint.check_tensors import renamed
from exporters.checkpoint.fold import EVERY, Floats
from exporters.checkpoint.stored import Stored
from quant import quantize_per_channel

_LAYER = re.compile(r"vision\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class VisionEncoder:
    """The vision encoder of an open checkpoint.

    Attributes:
        spec: its sizes.
        pictures: how pictures become its inputs.
        names: of the stored tensors.
    """

    spec: EncoderSpec
    pictures: PictureSpec
    names: EncoderNames = field(repr=False)
    _tensors: Mapping[str, Stored] = field(repr=False)

    @classmethod
    def open(cls, config: Mapping[str, Any], folder: Path, tensors: Mapping[str, Stored]) -> VisionEncoder | None:
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
        family = ENCODERS.get(fields.text("model_type"))
        if family is None:
            return None
        tensors = renamed(tensors, encoder_tensor)
        if tensors.keys().isdisjoint({family.names.patches + ".weight", family.names.projector + ".weight"}):
            return None
        processor = read_processor(folder)
        spec = family.describe(fields, processor)
        found = cls(spec, family.pictures(fields, processor), family.names, tensors)
        fields.table("vision_config").check_read(ENCODER)
        processor.check_read(PROCESSOR)
        for name, shape in found.shapes.items():
            stored = tensors.get(name)
            if stored is None or stored.shape != shape:
                raise CheckpointError(
                    f"weights: {name}",
                    got="no such tensor" if stored is None else f"shape {list(stored.shape)}",
                    expected=f"shape {list(shape)}, as vision_config of config.json says",
                    fix="The weights and config.json do not belong together; fetch both again.",
                )
        return found

    @property
    def files(self) -> set[Path]:
        """The files of its tensors."""
        return {self._tensors[name].file for name in self.shapes}

    def check_values(self) -> None:
        """Reject values that no graph can represent.

        Raises:
            CheckpointError: naming a tensor with elements that are NaN or infinite.
        """
        for name in self.shapes:
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
        if name == MERGED_MEANS:
            return (np.eye(self.spec.merged) - 1 / self.spec.merged).astype(np.float32)
        if "_mean." in name:
            return self._means(name)
        if name == CENTER:
            return np.full(self.spec.matrices[CENTER], -1 / self.spec.matrices[CENTER][1], np.float32)
        if name in (LAST_NORM, LAST_NORM_BIAS):
            return (self._weight if name == LAST_NORM else self._bias)(_named(self.names.last_norm))
        entry = (PATCHES, POSITIONS, PATCHES_BIAS, TABLE)
        if name in entry or name.endswith(("o_proj.weight", "o_proj.bias", "fc2.weight", "fc2.bias")):
            centered = _centered(self._written(name))
            return centered.T if name == POSITIONS else centered
        if name == PROJECTOR:
            return self._weight(self.names.projector) * self._folded("weight")
        if name == PROJECTOR_BIAS:
            bias: Floats = self._weight(self.names.projector) @ self._folded("bias")
            return bias if self.names.projector_out is None else bias + self._bias(self.names.projector)
        if name in (PROJECTOR_OUT, PROJECTOR_OUT_BIAS):
            assert self.names.projector_out is not None, "the projector has two matrices"
            return (self._weight if name == PROJECTOR_OUT else self._bias)(self.names.projector_out)
        match = _LAYER.fullmatch(name)
        assert match is not None, "a tensor of a layer"
        return self._layer(match[2], int(match[1]))

    def _positions(self) -> Floats:
        """What is added to each input, `[inputs, hidden]`: its position, and the bias of patches or the class."""
        spec, names = self.spec, self.names
        table, order = self._stored(names.positions), block_order(spec.side, spec.side, spec.merge)
        if names.class_row is None:
            return (table[_positions(spec)] + self._bias(names.patches))[order]
        own, patches = table[0, :1] + self._stored(names.class_row)[0], table[0, 1:] + self._bias(names.patches)
        return np.concatenate([patches[order], own])

    def _folded(self, kind: str) -> Floats:
        """The weights or biases of the norm before the projector, for each element of merged patches."""
        if self.spec.norms == "patches":
            return np.tile(self._stored(f"{_named(self.names.last_norm)}.{kind}"), self.spec.merged)
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
            if self.spec.has_shapes:  # a matrix of rows, columns and channels
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
        reads = {"q_proj": names.q, "k_proj": names.k, "v_proj": names.v, "fc1": names.fc1}
        if matrix in reads:
            norm = names.feed_forward_norm if matrix == "fc1" else names.attention_norm
            weight = self._weight(reads[matrix], layer)
            if kind == "weight":
                return weight * self._weight(norm, layer)
            return self._bias(reads[matrix], layer) + weight @ self._bias(norm, layer)
        is_attention = matrix == "o_proj"
        writes, scale = (names.o, names.attention_scale) if is_attention else (names.fc2, names.feed_forward_scale)
        weight = self._weight(writes, layer)
        factors = np.ones(len(weight), np.float32) if scale is None else self._stored(scale, layer)
        if kind == "weight":
            return weight * factors[:, None]
        bias = self._bias(writes, layer)
        if is_attention:  # shares of a patch sum to 1, so the bias of values reaches the result
            bias = bias + weight @ self._layer("v_proj.bias", layer)
        return bias * factors

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
        """The projections that checkpoints have no biases of."""
        return () if self.spec.biased_inputs else (self.names.q, self.names.k, self.names.v)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the stored tensors."""
        spec, names = self.spec, self.names
        inner = spec.output if spec.projector_width is None else spec.projector_width
        positions = spec.table_side**2 if spec.has_shapes else spec.patches
        found: dict[str, tuple[int, ...]] = {
            names.patches + ".weight": (spec.hidden, 3, spec.patch, spec.patch),
            names.patches + ".bias": (spec.hidden,),
            names.positions: (1, spec.inputs, spec.hidden) if spec.has_class else (positions, spec.hidden),
            names.projector + ".weight": (inner, spec.hidden * spec.merged),
        }
        if spec.has_shapes:
            found[names.patches + ".weight"] = spec.hidden, spec.patch_values
        if names.class_row is not None:
            found[names.class_row] = 1, 1, spec.hidden
        if names.projector_out is not None:
            found |= {names.projector + ".bias": (inner,), names.projector_out + ".bias": (spec.output,)}
            found[names.projector_out + ".weight"] = spec.output, inner
        norms = list[str]()
        for layer in range(spec.layers):
            norms += [each.format(layer=layer) for each in (names.attention_norm, names.feed_forward_norm)]
            for name, shape in {
                **dict.fromkeys((names.q, names.k, names.v, names.o), (spec.hidden, spec.hidden)),
                names.fc1: (spec.intermediate, spec.hidden),
                names.fc2: (spec.hidden, spec.intermediate),
            }.items():
                found[name.format(layer=layer) + ".weight"] = shape
                if name not in self._unbiased:
                    found[name.format(layer=layer) + ".bias"] = shape[:1]
            for scale in filter(None, (names.attention_scale, names.feed_forward_scale)):
                found[scale.format(layer=layer)] = (spec.hidden,)
        found |= {f"{norm}.{kind}": (spec.hidden,) for norm in norms for kind in ("weight", "bias")}
        for kind in ("weight", "bias"):
            if spec.norms != "merged":
                found[f"{_named(names.last_norm)}.{kind}"] = (spec.hidden,)
            if spec.norms != "patches":
                found[f"{_named(names.merged_norm)}.{kind}"] = (spec.hidden * spec.merged,)
        return found


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
        found = self.encoder.tensor(high)
        if high not in self.wide:
            return found
        rounded = quantize_per_channel(by_inputs(found)).dequantize().T
        return rounded if name == high else found - rounded


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
        found = self.encoder.tensor(name)
        outputs = (PROJECTOR, PROJECTOR_BIAS)
        if self.spec.projector == "mlp":
            outputs = PROJECTOR_OUT, PROJECTOR_OUT_BIAS
        return self.write(found) if name in outputs else found


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
