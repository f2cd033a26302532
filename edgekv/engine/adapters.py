"""The adapters of a bundle, alone or several together, in memory that graphs can be bound to."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle, LoraAdapter, Manifest, lora_tensor, open_lora
from edgekv.engine.sink import read_sink
from edgekv.errors import UsageError
from edgekv.kv import Sink
from edgekv.kv.memory import aligned_zeros
from edgekv.runtime.adapter import AdapterMemory
from edgekv.spec import LOGITS, LoraSlots, LoraTarget, lora_a, lora_b, lora_group

_KEPT = 16  # adapters whose memory is kept
_LARGEST_SCALE = 100.0


@dataclass(frozen=True, slots=True)
class LoraChoice:
    """An adapter and its scale.

    Attributes:
        name: in the bundle.
        scale: multiplies what it adds.
    """

    name: str
    scale: float = 1.0

    @classmethod
    def parse(cls, text: str, field: str = "lora") -> tuple[LoraChoice, ...]:
        """Read `NAME`, `NAME=SCALE`, or several with commas between.

        Raises:
            UsageError: no name, a name twice, or a scale that is 0, no number, or above 100 in magnitude.
        """
        if not isinstance(text, str):  # as a caller of the library may give it
            raise UsageError(field, got=repr(text)[:80], expected="a name", fix="See edgekv lora ls BUNDLE.")
        choices = tuple(cls._parse_one(choice.strip(), text, field) for choice in text.split(","))
        if len({choice.name for choice in choices}) < len(choices):
            raise UsageError(field, got=repr(text), expected="each adapter once", fix="Add up its scales.")
        return choices

    @classmethod
    def _parse_one(cls, text: str, whole: str, field: str) -> LoraChoice:
        name, equals, number = text.partition("=")
        try:
            scale = float(number) if equals else 1.0
        except ValueError:
            scale = math.nan
        if not name or not 0 < abs(scale) <= _LARGEST_SCALE:
            expected = f"NAME or NAME=SCALE, a scale up to {_LARGEST_SCALE:g} and not 0"
            raise UsageError(field, got=repr(whole), expected=expected, fix="See edgekv lora ls BUNDLE.")
        return cls(name, scale)

    def __str__(self) -> str:
        return self.name if self.scale == 1 else f"{self.name}={self.scale:g}"


@dataclass(frozen=True, slots=True, eq=False)
class BoundAdapter:
    """One or several adapters, ready to be bound. Equal choices of one model are one object.

    Attributes:
        choices: the adapters.
        memory: what the graphs read.
        sink: the bundle's sink with these adapters; None if it has none.
        key: a hash of all that determines the rows that are computed with them.
    """

    choices: tuple[LoraChoice, ...]
    memory: AdapterMemory = field(repr=False)
    sink: Sink | None = field(repr=False)
    key: str

    def __str__(self) -> str:
        return ",".join(map(str, self.choices))


class Adapters:
    """Opens the adapters of a bundle; the memory of the latest is kept. Not thread-safe."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._kept: OrderedDict[tuple[tuple[str, LoraChoice], ...], BoundAdapter] = OrderedDict()

    def open(self, choices: Sequence[LoraChoice]) -> BoundAdapter:
        """These adapters together.

        Raises:
            UsageError: the bundle has no slots or no adapter of a name, their ranks exceed that of the slots, or a
                scale exceeds an encoding.
            BundleError: an adapter is damaged.
        """
        slots = self._bundle.manifest.lora
        if slots is None:
            fix = "Export it with --lora-slots 16."
            raise UsageError("lora", got="a bundle without slots", expected="slots for adapters", fix=fix)
        adapters = [open_lora(self._bundle, choice.name) for choice in choices]
        key = tuple((adapter.sha256, choice) for adapter, choice in zip(adapters, choices, strict=True))
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = self._make(slots, adapters, choices)
        self._kept[key] = made
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return made

    def _make(self, slots: LoraSlots, adapters: Sequence[LoraAdapter], choices: Sequence[LoraChoice]) -> BoundAdapter:
        manifest = self._bundle.manifest
        shapes = slot_shapes(manifest)
        memory = {name: aligned_zeros(shape, "int16") for name, shape in shapes.items()}
        used: dict[tuple[int, LoraTarget], int] = {}
        own = read_sink(self._bundle)
        rows: dict[str, NDArray[Any]] = {}
        for adapter, choice in zip(adapters, choices, strict=True):
            arrays = adapter.arrays()
            _check_arrays(adapter, arrays, slots, shapes, own, manifest)
            for layer in range(manifest.model.layers):
                for slot in slots.of_layer(layer):
                    if lora_tensor("a", layer, slot.target) in arrays:
                        first = used.get((layer, slot.target), 0)
                        end = _place(memory, slots, layer, slot.target, first, arrays, choice)
                        used[layer, slot.target] = end
            _add_sink(rows, own, arrays, choice, manifest)
        said = repr([(adapter.sha256, choice) for adapter, choice in zip(adapters, choices, strict=True)])
        encodings = {name: manifest.encodings[encoding] for name, encoding in _encoding_names(manifest).items()}
        return BoundAdapter(
            tuple(choices),
            AdapterMemory(memory, encodings),
            None if own is None else _sink(own, rows, manifest),
            hashlib.sha256(said.encode()).hexdigest(),
        )


def slot_shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """The inputs for adapters of all layers, by name."""
    if manifest.lora is None:
        return {}
    layers = range(manifest.model.layers)
    return {name: shape for layer in layers for name, shape, _ in manifest.lora.tensors(layer)}


def _encoding_names(manifest: Manifest) -> dict[str, str]:
    assert manifest.lora is not None, "there are slots"
    layers = range(manifest.model.layers)
    return {name: encoding for layer in layers for name, _, encoding in manifest.lora.tensors(layer)}


def _check_arrays(
    adapter: LoraAdapter,
    arrays: Mapping[str, NDArray[Any]],
    slots: LoraSlots,
    shapes: Mapping[str, tuple[int, ...]],
    sink: Sink | None,
    manifest: Manifest,
) -> None:
    """Refuse tensors that are missing, or that have another type or shape than the slots and the sink."""
    fixed = {} if sink is None else {**sink.rows, LOGITS: sink.logits}
    forms = {name: (array.dtype, array.shape) for name, array in fixed.items()}
    for layer in range(manifest.model.layers):
        for slot in slots.of_layer(layer):
            a, b = (lora_tensor(half, layer, slot.target) for half in ("a", "b"))
            if a in arrays or b in arrays:
                rank = arrays[a].shape[0] if a in arrays and arrays[a].ndim else 0
                inputs = shapes[lora_a(layer, lora_group(slot.target))][2]
                forms[a] = np.dtype(np.int16), (max(rank, 1), inputs)
                forms[b] = np.dtype(np.int16), (max(rank, 1), slot.width * len(slot.pieces))
    for name, (dtype, shape) in forms.items():
        held = arrays.get(name)
        if held is None or (held.dtype, held.shape) != (dtype, shape):
            got = "nothing" if held is None else f"{held.dtype} {list(held.shape)}"
            raise adapter.refusal(f"{name}: {got}", f"{dtype} {list(shape)}")


def _place(
    memory: Mapping[str, NDArray[Any]],
    slots: LoraSlots,
    layer: int,
    target: LoraTarget,
    first: int,
    arrays: Mapping[str, NDArray[Any]],
    choice: LoraChoice,
) -> int:
    """Copy a projection's A and B into the columns from `first` on; return the first free column after them.

    Raises:
        UsageError: there are not enough columns, or the scale takes B beyond its encoding.
    """
    a, b = (arrays[lora_tensor(half, layer, target)] for half in ("a", "b"))
    end = first + len(a)
    if end > slots.rank:
        raise UsageError(
            "lora",
            got=f"rank {end} of layer {layer}, {target}, with {choice.name}",
            expected=f"at most {slots.rank}, the rank of the slots",
            fix="Use fewer adapters at once, or export with a larger --lora-slots.",
        )
    if choice.scale != 1:
        scaled = np.rint(b * choice.scale)
        limit = np.iinfo(np.int16).max
        if (largest := float(np.abs(scaled).max())) > limit:
            raise UsageError(
                "lora",
                got=f"{choice}: layer {layer}, {target} exceeds its encoding {largest / limit:.2f} times",
                expected=f"a scale up to {abs(choice.scale) * limit / largest:.3g}",
                fix="Use a smaller scale, or export with a larger --lora-reach.",
            )
        b = scaled.astype(np.int16)
    columns = slots.columns(target)
    place = slice(columns.start + first, columns.start + end)
    memory[lora_a(layer, lora_group(target))][0, 0, :, place] = a.T
    slot = slots[target]
    for number, piece in enumerate(slot.pieces):
        part = b[:, number * slot.width : (number + 1) * slot.width]
        memory[lora_b(layer, target, piece)][0, 0, place] = part
    return end


def _add_sink(
    rows: dict[str, NDArray[Any]],
    own: Sink | None,
    arrays: Mapping[str, NDArray[Any]],
    choice: LoraChoice,
    manifest: Manifest,
) -> None:
    """Add the difference that an adapter makes to the sink's rows and logits, in real numbers."""
    if own is None:
        return
    for name, base in {**own.rows, LOGITS: own.logits}.items():
        encoding = manifest.encodings[name]
        change = (encoding.dequantize(arrays[name]) - encoding.dequantize(base)) * np.float32(choice.scale)
        rows[name] = rows.get(name, encoding.dequantize(base)) + change


def _sink(own: Sink, rows: Mapping[str, NDArray[Any]], manifest: Manifest) -> Sink:
    integers = {name: manifest.encodings[name].quantize(values) for name, values in rows.items()}
    logits = integers.pop(LOGITS)
    return Sink(own.tokens, integers, np.ascontiguousarray(logits))
