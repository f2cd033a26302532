"""What an adapter needs of the base model when it is added: the transforms that were folded into its weights.

They are stored in the bundle, so that adding an adapter needs no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from edgekv.bundle import HEADS_FILE, Bundle
from edgekv.errors import BundleError
from edgekv.machine.system import read_file
from edgekv.machine.tensor_file import TensorFileError, decode_tensors, encode_tensors
from edgekv.spec import EMBEDDING, Config, DecoderSpec, describe, views
from exporters.checkpoint.aligned import read_heads
from exporters.checkpoint.channels import SplitResidual
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.fold import EVERY, Factors, Rows, folds
from exporters.checkpoint.folded import FoldedCheckpoint
from exporters.checkpoint.residual import stored_folds
from exporters.checkpoint.tensors import Tensors
from exporters.quantize.reference import Floats
from quant import QuantizedWeight

LORA_FILE = "lora.safetensors"

_CONFIG = "config"
_EXACT, _FOLDED, _NEURONS, _SINK, _DIRECTIONS = "exact.", "folded.", "neurons.", "sink.embedding", "directions"


def write_lora_base(checkpoint: Checkpoint, folded: Tensors, sink: tuple[int, ...], folder: Path) -> None:
    """Write `LORA_FILE`.

    Args:
        checkpoint: the exact weights.
        folded: the same after the transforms.
        sink: tokens that no graph computes.
        folder: the target.
    """
    small = [view for view in views(checkpoint.spec) if not view.is_matrix]
    arrays = {_FOLDED + view.name: folded.tensor(view.name) for view in small}
    arrays |= {_EXACT + view.name: checkpoint.tensor(view.name) for view in small if view.role == "norm"}
    if isinstance(folded, FoldedCheckpoint):
        for layer in range(checkpoint.spec.layers):
            if (scales := folded.neuron_scales(layer)) is not None:
                arrays[f"{_NEURONS}{layer}"] = scales
        if folded.directions is not None:
            arrays[_DIRECTIONS] = folded.directions
    if sink:
        arrays[_SINK] = folded.tensor(EMBEDDING, np.array(sink))
    (folder / LORA_FILE).write_bytes(encode_tensors(arrays, {_CONFIG: json.dumps(dict(checkpoint.config))}))


@dataclass(frozen=True, slots=True)
class ExportedBase:
    """The base model while it is exported.

    Attributes:
        checkpoint: the exact weights.
        folded: the same after the transforms.
    """

    checkpoint: Checkpoint
    folded: Tensors

    @property
    def spec(self) -> DecoderSpec:
        """The decoder."""
        return self.checkpoint.spec

    def change(self, key: str, change: Factors) -> Factors:
        """As `LoraBase.change`."""
        change = self.checkpoint.change(key, change)
        return self.folded.change(key, change) if isinstance(self.folded, FoldedCheckpoint) else change


@dataclass(frozen=True, slots=True)
class LoraBase:
    """The base model of a bundle, as far as adapters need it; `Tensors` of norms alone.

    Attributes:
        spec: the decoder.
    """

    spec: DecoderSpec
    _arrays: Mapping[str, Floats]
    _folded: FoldedCheckpoint | None = None
    _split: SplitResidual | None = None

    @classmethod
    def open(cls, bundle: Bundle) -> LoraBase:
        """Read `LORA_FILE` of a bundle.

        Raises:
            BundleError: it has no slots, or the file is damaged.
        """
        path, manifest = bundle.path / LORA_FILE, bundle.manifest
        if manifest.lora is None:
            fix = "Export it with --lora-slots 16, or merge the adapter: edgekv export --lora FOLDER"
            raise BundleError(f"bundle {bundle.path}", got="graphs without slots", expected="slots", fix=fix)
        try:
            file = decode_tensors(read_file(path, manifest.files[LORA_FILE].bytes))
            config = json.loads(file.metadata[_CONFIG])
        except (OSError, KeyError, ValueError, TensorFileError) as error:
            fix = "Export the bundle again."
            raise BundleError(str(path), got=error, expected="the transforms of the base model", fix=fix) from None
        vocabulary = manifest.model.vocabulary
        spec = msgspec.structs.replace(describe(Config(config, LORA_FILE)), vocabulary=vocabulary)
        split, heads = None, None
        if manifest.model.split:
            split = SplitResidual(spec, manifest.model.split)
            spec = split.spec
        if manifest.recipe.heads != "none":
            heads = read_heads(bundle.path / HEADS_FILE, manifest.files[HEADS_FILE].bytes)
        plain = cls(spec, file.arrays)
        neurons = {
            int(name.removeprefix(_NEURONS)): array for name, array in file.arrays.items() if name.startswith(_NEURONS)
        }
        folded = FoldedCheckpoint(plain, manifest.recipe, heads, neurons, file.arrays.get(_DIRECTIONS))
        return replace(plain, _folded=folded, _split=split)

    def tensor(self, key: str, rows: Rows = EVERY) -> Floats:
        """A norm before the transforms."""
        exact: Floats = self._arrays[_EXACT + key][rows]
        return exact

    def integers(self, key: str, rows: slice = EVERY) -> QuantizedWeight:
        """None are stored."""
        raise ValueError(f"{key}: got a request for integers; expected none")

    def folded(self, key: str) -> Floats:
        """A norm or bias after the transforms."""
        return self._arrays[_FOLDED + key]

    @property
    def sink_embedding(self) -> Floats | None:
        """The embeddings of the sink, `[n, hidden]`; None if graphs compute every token."""
        return self._arrays.get(_SINK)

    def change(self, key: str, change: Factors) -> Factors:
        """A change of a matrix of the checkpoint, as the bundle's graphs need it."""
        assert self._folded is not None, "an open base has transforms"
        view = next(view for view in views(self.spec) if view.name == key)
        for stored in folds(view, stored_folds(self.spec)):
            change = stored.change(change)
        if self._split is not None and (fold := self._split(view)) is not None:
            change = fold.change(change)
        return self._folded.change(key, change)
