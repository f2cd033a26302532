"""An adapter in the encodings of a bundle's slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import ClippedMatrix, Manifest, lora_tensor
from edgekv.errors import CheckpointError
from edgekv.graphs.decoder import query_gain
from edgekv.spec import LORA_A, LORA_TARGETS, DecoderSpec, LoraTarget, View, lora_b, views
from exporters.checkpoint.fold import EVERY, Factors
from exporters.checkpoint.lora import Adapter
from exporters.lora.base import LoraBase

_ROOM = 4.0
"""How much longer than 1 columns of A may become: `x A` stays below a quarter of its bound for all but the rarest x."""


@dataclass(frozen=True, slots=True)
class QuantizedAdapter:
    """An adapter's integers.

    Attributes:
        arrays: A's `[r, in]` and B's `[r, out]`, by `lora_tensor`.
        rank: the largest r.
        targets: the projections that it changes.
        clipped: the B's that did not fit.
    """

    arrays: Mapping[str, NDArray[Any]]
    rank: int
    targets: tuple[LoraTarget, ...]
    clipped: tuple[ClippedMatrix, ...]


def adapter_views(base: Base) -> Iterator[tuple[View, LoraTarget]]:
    """The matrices of the base model that adapters can change, if there are slots for them."""
    for view in views(base.spec):
        target = next((target for target in LORA_TARGETS if target == view.role), None)
        if target is not None and view.is_matrix:
            yield view, target


class Base(Protocol):
    """A base model with what was folded into its weights."""

    @property
    def spec(self) -> DecoderSpec:
        """The decoder."""

    def change(self, key: str, change: Factors) -> Factors:
        """A change of a matrix of the checkpoint, as graphs need it."""


def largest_elements(adapters: Iterable[Adapter], base: Base) -> dict[tuple[int, LoraTarget], float]:
    """The largest element of B of some adapters, by layer and projection.

    Raises:
        CheckpointError: as `folded_factors`.
    """
    largest: dict[tuple[int, LoraTarget], float] = {}
    for adapter in adapters:
        for at, factors in folded_factors(adapter, base).items():
            largest[at] = max(largest.get(at, 0.0), float(np.abs(factors.left).max()))
    return largest


def folded_factors(adapter: Adapter, base: Base) -> dict[tuple[int, LoraTarget], Factors]:
    """What an adapter adds to each projection of a bundle's graphs, in float32, with columns of A of the length 1.

    Raises:
        CheckpointError: NaN or infinite elements; the tensor is named.
    """
    normalized: dict[tuple[int, LoraTarget], Factors] = {}
    for view, target in adapter_views(base):
        module = view.key.removesuffix(".weight")
        product = adapter.products.get(module)
        if product is None:
            continue
        for half, tensor in (("A", product.right), ("B", product.left)):
            if broken := tensor.count_not_finite():
                raise CheckpointError(
                    f"{adapter.folder}: {module}.lora_{half}",
                    got=f"{broken} elements that are NaN or infinite",
                    expected="finite numbers",
                    fix="Its training diverged, or the file is damaged: use another adapter.",
                )
        assert view.layer is not None, "projections are parts of layers"
        gain = query_gain(base.spec) if target == "q" and base.spec.qk_norm_of(view.layer) is None else 1.0
        left = product.left.open()[view.stored_rows(EVERY)].astype(np.float32)
        left *= np.float32(product.scaling * view.gain * gain)
        changed = base.change(view.name, Factors(left, product.right.open().astype(np.float32)))
        normalized[view.layer, target] = _normalized(changed)
    return normalized


def quantize_adapter(adapter: Adapter, base: LoraBase, manifest: Manifest) -> QuantizedAdapter:
    """Round an adapter to the encodings of a bundle's slots; elements of B beyond them are clipped.

    Raises:
        CheckpointError: as `folded_factors`.
    """
    factors = folded_factors(adapter, base)
    arrays: dict[str, NDArray[Any]] = {}
    clipped: list[ClippedMatrix] = []
    for (layer, target), exact in factors.items():
        columns, encoding = manifest.encodings[LORA_A], manifest.encodings[lora_b(layer, target)]
        balanced = _balanced(exact, columns.reach[1], encoding.reach[1])
        arrays[lora_tensor("a", layer, target)] = columns.quantize(balanced.right)
        arrays[lora_tensor("b", layer, target)] = encoding.quantize(np.ascontiguousarray(balanced.left.T))
        magnitudes, most = np.abs(balanced.left), encoding.reach[1]
        if beyond := int((magnitudes > most + encoding.scale / 2).sum()):
            share, reach = beyond / magnitudes.size, float(magnitudes.max() / most)
            clipped.append(ClippedMatrix(layer=layer, target=target, elements=beyond, share=share, reach=reach))
    targets = tuple(target for target in LORA_TARGETS if any(at[1] == target for at in factors))
    rank = max((len(pair.right) for pair in factors.values()), default=0)
    return QuantizedAdapter(arrays, rank, targets, tuple(clipped))


def _normalized(factors: Factors) -> Factors:
    """The same product with rows of the right factor of the length 1."""
    lengths = np.linalg.norm(factors.right, axis=1)
    safe = np.where(lengths > 0, lengths, 1).astype(np.float32)
    return Factors(factors.left * np.where(lengths > 0, lengths, 0).astype(np.float32), factors.right / safe[:, None])


def _balanced(factors: Factors, max_right: float, max_left: float) -> Factors:
    """The same product, with what is too large for B moved to A as far as `x A` has room.

    Args:
        factors: of the length 1.
        max_right: the largest element that A can have.
        max_left: the same of B.
    """
    tiny = np.finfo(np.float32).tiny
    needed = np.abs(factors.left).max(axis=0) / max_left
    room = np.minimum(_ROOM, max_right / np.maximum(np.abs(factors.right).max(axis=1), tiny))
    moved = np.clip(needed, 1, np.maximum(room, 1)).astype(np.float32)
    return Factors(factors.left / moved, factors.right * moved[:, None])
