"""Keys of stages: hashes over everything that a stage depends on."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import RecipeRecord
from edgekv.spec.tensors import HEAD, HEAD_TURN
from exporters.checkpoint.aligned import AlignedHeads
from exporters.checkpoint.checkpoint import Checkpoint

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # since Python 3.11


def stage_keys(
    checkpoint: Checkpoint,
    weights_sha256: str,
    tokens: NDArray[Any],
    context: int,
    recipe: RecipeRecord,
    sink: int = 0,
    heads: AlignedHeads | None = None,
) -> list[str]:
    """The key of each layer's stage and of the head's, in hexadecimal.

    A key depends on the weights, the configuration, the calibration tokens, the program, and the recipe's rules up to
    this stage: another rule for one layer does not change the keys of earlier layers.

    Args:
        checkpoint: the model.
        weights_sha256: its `Checkpoint.weights_sha256`.
        tokens: calibration token ids `[windows, T]`.
        context: context length for the rotary embedding.
        recipe: how each matrix is quantized, and the transforms folded into it.
        sink: number of first tokens of each window that no graph computes.
        heads: transforms of single heads.
    """
    spec = checkpoint.spec
    ropes = [rope.rotation(context) for rope in spec.ropes]
    shared = {
        "program": program_sha256(),
        "weights": weights_sha256,
        "configuration": checkpoint.config_sha256,
        "windows": [spec.window(layer) for layer in range(spec.layers)],
        "rotary": [(rope.inverse_frequencies.tolist(), rope.attention_factor) for rope in ropes],
        "tokens": (tokens.shape, hashlib.sha256(tokens.astype(np.int64).tobytes()).hexdigest()),
        "sink": sink,
        "heads": None if heads is None else _heads_sha256(heads),
        "folded": (recipe.rotation, recipe.value_rotation, recipe.key_scaling, recipe.neuron_scaling),
        "split": [(each.channel, each.parts) for each in spec.split],
    }
    key, keys = _hashed(shared), []
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        key = _hashed([key, [rule for rule in recipe.weights if rule.tensor.startswith(prefix)]])
        keys.append(key)
    ends = [rule for rule in recipe.weights if rule.tensor in (HEAD, HEAD_TURN)]
    return [*keys, _hashed([key, spec.vocabulary, ends])]


@cache
def program_sha256() -> str:
    """A hash of edgekv's source files, and of numpy's version."""
    digest = hashlib.sha256(np.__version__.encode())
    for package in ("quant", "devices", "edgekv", "exporters"):
        for name, content in _sources(resources.files(package)):
            digest.update(f"{package}/{name}\0".encode() + content)
    return digest.hexdigest()


def _heads_sha256(heads: AlignedHeads) -> str:
    digest = hashlib.sha256()
    for head in heads.values():
        for values in (head.pairs, head.rest, head.turn, head.steps):
            digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def _sources(folder: Traversable, prefix: str = "") -> list[tuple[str, bytes]]:
    found = []
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.is_dir():
            found += _sources(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".py"):
            found.append((prefix + entry.name, entry.read_bytes()))
    return found


def _hashed(content: object) -> str:
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()
