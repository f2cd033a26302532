"""LoRA slots: inputs of every graph through which adapters change its projections at run time.

An adapter adds `x A B` to the result of a projection, `A` `[in, r]` and `B` `[r, out]`. Projections that read the same
input share one stack of A's, `[1, 1, in, n * R]` for n projections of rank R. B is `[1, 1, n * R, out]`, with zeros in
the rows of the other projections, and where a projection is computed head by head there is one B for each head. Zeros
add nothing, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Literal, get_args

import msgspec

from edgekv.spec.decoder import DecoderSpec

LoraTarget = Literal["q", "k", "v", "o", "conv_b", "conv_c", "conv_x", "conv_out", "gate", "up", "down"]
LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)

LoraGroup = Literal["qkv", "o", "conv_in", "conv_out", "gate_up", "down"]
LORA_GROUPS: dict[LoraGroup, tuple[LoraTarget, ...]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "conv_in": ("conv_b", "conv_c", "conv_x"),
    "conv_out": ("conv_out",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
"""Projections that read the same input."""

_OF_ATTENTION = LORA_GROUPS["qkv"] + LORA_GROUPS["o"]
_OF_CONVOLUTION = LORA_GROUPS["conv_in"] + LORA_GROUPS["conv_out"]

LORA_PREFIX = "lora_"
"""How the names of all inputs for adapters begin."""

STACK = "|"
"""Between the names of inputs that a rewritten graph reads as one, stacked along the first axis."""

LORA_A = "lora_a"
"""Name of the encoding of every A: its columns have the length 1."""

_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Heads = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
_Rank = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]


class LoraSlot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A projection that adapters can change.

    Attributes:
        target: the projection.
        inputs: its input channels.
        outputs: its output channels, of all heads.
        heads: the number of heads that are computed one by one; 0 for all outputs at once.
    """

    target: LoraTarget
    inputs: _Size
    outputs: _Size
    heads: _Heads = 0

    def __post_init__(self) -> None:
        if self.heads and self.outputs % self.heads:
            raise ValueError(f"outputs: got {self.outputs}; expected a multiple of {self.heads} heads")

    @property
    def pieces(self) -> tuple[int | None, ...]:
        """The heads that have a B of their own; `(None,)` for one B."""
        return tuple(range(self.heads)) or (None,)

    @property
    def width(self) -> int:
        """Columns of each B."""
        return self.outputs // (self.heads or 1)


class LoraSlots(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The slots of every layer.

    Attributes:
        rank: R, the most columns of A that an adapter, or several together, may have for one projection.
        slots: one for each projection.
        convolutions: the layers without attention.
    """

    rank: _Rank
    slots: tuple[LoraSlot, ...]
    convolutions: frozenset[int] = frozenset()

    @classmethod
    def of(cls, spec: DecoderSpec, rank: int, targets: Collection[LoraTarget]) -> LoraSlots:
        """The slots of a decoder for some of its projections."""
        query, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        by_head, hidden = spec.qk_norm != "all-heads", spec.hidden
        slots = {
            "q": LoraSlot(target="q", inputs=spec.hidden, outputs=query, heads=spec.heads * by_head),
            "k": LoraSlot(target="k", inputs=spec.hidden, outputs=keys, heads=spec.kv_heads * by_head),
            "v": LoraSlot(target="v", inputs=spec.hidden, outputs=keys, heads=spec.kv_heads),
            "o": LoraSlot(target="o", inputs=query, outputs=spec.hidden),
            "gate": LoraSlot(target="gate", inputs=spec.hidden, outputs=spec.intermediate),
            "up": LoraSlot(target="up", inputs=spec.hidden, outputs=spec.intermediate),
            "down": LoraSlot(target="down", inputs=spec.intermediate, outputs=spec.hidden),
        }
        if not spec.gated:
            del slots["gate"]
        if spec.convolution is None:
            return cls(rank=rank, slots=tuple(slot for name, slot in slots.items() if name in targets))
        slots |= {name: LoraSlot(target=name, inputs=hidden, outputs=hidden) for name in _OF_CONVOLUTION}
        chosen = tuple(slots[name] for name in LORA_TARGETS if name in targets)
        return cls(rank=rank, slots=chosen, convolutions=spec.convolution.layers)

    def __contains__(self, target: str) -> bool:
        return any(slot.target == target for slot in self.slots)

    def __getitem__(self, target: LoraTarget) -> LoraSlot:
        """The slot of a projection; KeyError if there is none."""
        return next((slot for slot in self.slots if slot.target == target), None) or _missing(target)

    def group(self, name: LoraGroup) -> tuple[LoraSlot, ...]:
        """The slots of a group, which share a stack of A's; empty if there is none."""
        return tuple(self[target] for target in LORA_GROUPS[name] if target in self)

    def of_layer(self, layer: int) -> tuple[LoraSlot, ...]:
        """The slots of a layer: those of attention, or those of its convolution, and those of its feed-forward."""
        others = _OF_ATTENTION if layer in self.convolutions else _OF_CONVOLUTION
        return tuple(slot for slot in self.slots if slot.target not in others)

    def groups_of_layer(self, layer: int) -> list[tuple[LoraGroup, tuple[LoraSlot, ...]]]:
        """The slots of a layer by group, in the order of the graphs' inputs."""
        slots = self.of_layer(layer)
        groups = [(name, tuple(slot for slot in self.group(name) if slot in slots)) for name in LORA_GROUPS]
        return [(name, group) for name, group in groups if group]

    def columns(self, target: LoraTarget) -> slice:
        """The columns of its group's stack of A's that belong to a projection, and the rows of its B."""
        before = [slot.target for slot in self.group(lora_group(target))].index(target)
        return slice(before * self.rank, (before + 1) * self.rank)

    def tensors(self, layer: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Name, shape and name of the encoding of each input of a layer, in the order of the graphs' inputs."""
        for name, slots in self.groups_of_layer(layer):
            ranks = len(slots) * self.rank
            yield lora_a(layer, name), (1, 1, slots[0].inputs, ranks), LORA_A
            for slot in slots:
                for piece in slot.pieces:
                    shape = (1, 1, ranks, slot.width)
                    yield lora_b(layer, slot.target, piece), shape, lora_b(layer, slot.target)


def _missing(target: str) -> LoraSlot:
    raise KeyError(target)


def lora_group(target: LoraTarget) -> LoraGroup:
    """The group of a projection."""
    return next(name for name, targets in LORA_GROUPS.items() if target in targets)


def lora_a(layer: int, group: LoraGroup) -> str:
    """Name of the input for a group's stack of A's."""
    return f"lora_a_{layer}_{group}"


def lora_b(layer: int, target: LoraTarget, head: int | None = None) -> str:
    """Name of the input for a projection's B, or a head's; without a head also that of their shared encoding."""
    return f"lora_b_{layer}_{target}" + ("" if head is None else f"_h{head}")


def lora_reach(layer: int, group: LoraGroup) -> str:
    """Name of `x A`, and of the greatest length of x that calibration has seen: columns of A have the length 1."""
    return f"layers.{layer}.lora.{group}"


def lora_added(layer: int, target: LoraTarget) -> str:
    """Name of `x A B`."""
    return f"layers.{layer}.lora.{target}.added"
