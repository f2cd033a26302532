"""Options of LoRA slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from devices import Device
from edgekv.bundle.formats import GraphFormat
from edgekv.errors import UsageError
from edgekv.option import Option
from exporters.checkpoint.lora.choice import AdapterChoice

if TYPE_CHECKING:
    from edgekv.spec import DecoderSpec, LoraSlots, LoraTarget
    from exporters.quantize.recipe import Recipe

_MAX_RANK = 256
_MIN_ARCH = 73
"""The HTP multiplies activations with int16 from here on."""


def _all_targets() -> tuple[LoraTarget, ...]:
    from edgekv.spec import LORA_TARGETS  # slow to import

    return LORA_TARGETS


def _read_targets(option: str, text: str) -> tuple[LoraTarget, ...]:
    from edgekv.spec import LORA_TARGETS  # slow to import

    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in LORA_TARGETS]:
        raise UsageError(option, got=repr(unknown[0]), expected=", ".join(LORA_TARGETS), fix=f"Use {option} q,v.")
    return tuple(target for target in LORA_TARGETS if target in names)


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """The slots that an export makes."""

    rank: Annotated[
        int,
        Option(
            "Give every graph inputs for adapters up to this rank in each projection, which `edgekv lora add` adds "
            "later.",
            "--lora-slots",
            metavar="RANK",
        ),
    ]
    targets: Annotated[
        tuple[LoraTarget, ...],
        Option(
            "Projections with slots: q, k, v, o, gate, up, down, comma-separated.",
            "--lora-targets",
            parse=_read_targets,
            shown="all of them",
        ),
    ] = field(default_factory=_all_targets)
    reach: Annotated[
        float,
        Option(
            "How far adapters may change a projection, relative to its range on the calibration text.", "--lora-reach"
        ),
    ] = 1.0
    calibrate: Annotated[
        tuple[AdapterChoice, ...],
        Option(
            "Fit slots and ranges to this adapter; repeat for several. Projections that no adapter changes use "
            "--lora-reach.",
            "--lora-calibrate",
            metavar="DIR[=SCALE]",
            parse=AdapterChoice.parse,
            collect=tuple,
        ),
    ] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= _MAX_RANK:
            raise UsageError("--lora-slots", got=self.rank, expected=f"1 to {_MAX_RANK}", fix="Use --lora-slots 16.")
        if not 0 < self.reach <= 100:
            raise UsageError("--lora-reach", got=self.reach, expected="above 0, at most 100", fix="Use 1.")

    def check(self, device: Device, graph_format: GraphFormat, recipe: Recipe) -> None:
        """Refuse what has no slots.

        Raises:
            UsageError: TFLite graphs, an HTP that does not multiply by int16 activations, or a recipe whose transforms
                depend on the base model's weights alone.
        """
        if recipe.key_scaling != "none":
            fix = 'Use "heads": "aligned" instead, or leave the slots out.'
            raise UsageError("--lora-slots", got='a recipe with "key_scaling"', expected="none", fix=fix)
        if graph_format == "tflite":
            fix = "Leave it out, or use --format onnx; --lora merges an adapter for good."
            raise UsageError("--lora-slots", got="--format tflite", expected="ONNX graphs", fix=fix)
        if device.arch < _MIN_ARCH:
            raise UsageError(
                "--lora-slots",
                got=f"{device.soc} (V{device.arch})",
                expected=f"V{_MIN_ARCH} or later, which multiplies by 16-bit inputs",
                fix="Merge the adapter with --lora, or choose a later device.",
            )

    def slots(self, spec: DecoderSpec) -> LoraSlots:
        """The slots of a decoder."""
        from edgekv.spec import LoraSlots

        return LoraSlots.of(spec, self.rank, self.targets)
