"""Manifests that say something else than the exporter wrote, under a seal that fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgekv.bundle import MANIFEST, MatrixPlace, RecipeRecord, TensorPlace, WeightPlaces, WeightRecord
from edgekv.bundle.formats import SEAL, seal_of
from edgekv.spec import EMBEDDING_STEPS, DecoderSpec, table_key, views
from edgekv.spec.tensors import matrices
from quant import Encoding


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest in a bundle's folder, as plain JSON, and seal it again."""
    file = folder / MANIFEST
    content = json.loads(file.read_text("utf-8"))
    del content[SEAL]
    change(content)
    file.unlink()  # it may be a link
    file.write_text(json.dumps(content | {SEAL: seal_of(content)}, indent=1), "utf-8")


def replace_in_manifest(folder: Path, old: str, new: str) -> None:
    """Replace text in the manifest, and seal it again."""
    file = folder / MANIFEST
    text = file.read_text("utf-8")
    assert old in text
    file.unlink()
    file.write_text(text.replace(old, new), "utf-8")
    change_manifest(folder, lambda content: None)


def int8_recipe(spec: DecoderSpec) -> RecipeRecord:
    """Every matrix of a decoder in 8 bits."""
    weights = [WeightRecord(tensor=name, dtype="int8", method="nearest") for name in matrices(spec)]
    return RecipeRecord(name="w8a16", rotation="none", weights=weights)


def places_in_one_file(spec: DecoderSpec, file: str) -> WeightPlaces:
    """Places for the weights of a decoder without biases, matrices in 8 bits, one after the other from byte 8 on."""
    found, end = WeightPlaces(), 8
    for view in views(spec):
        if view.is_matrix:
            columns, rows = view.shape
            scales, is_table = end + rows * columns, view.name == table_key(spec)
            place = MatrixPlace(
                file=file,
                dtype="int8",
                rows=rows,
                columns=columns,
                heads=1,
                integers=end,
                scales=scales,
                by_outputs=is_table,
            )
            found.matrices[view.name], end = place, scales + 4 * columns
        else:
            tensor = TensorPlace(file=file, shape=view.shape, offset=end, encoding=Encoding("u16", 0.5, 32768))
            found.tensors[view.name], end = tensor, end + tensor.extent.bytes
    steps = TensorPlace(file=file, shape=(spec.vocab, 1), offset=end, encoding=Encoding("u16", 0.5, 0))
    found.tensors[EMBEDDING_STEPS] = steps
    return found
