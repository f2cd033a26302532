"""Options of LoRA slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from devices import Device
from edgekv.bundle import GraphFormat
from edgekv.errors import UsageError
from edgekv.spec import LORA_TARGETS, DecoderSpec, LoraSlots, LoraTarget
from exporters.checkpoint.lora import AdapterChoice
from exporters.quantize.recipe import Recipe

_MOST_RANK = 256
_LEAST_ARCH = 73
"""The HTP multiplies activations with int16 from here on."""


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """The slots that an export makes.

    Attributes:
        rank: R, the most columns that the adapters of a projection may have together.
        targets: the projections.
        reach: how far adapters may change a projection, relative to the range of its result.
        calibrate: adapters that the range of B is chosen for; projections that none changes have the stated range.
    """

    rank: int
    targets: tuple[LoraTarget, ...] = LORA_TARGETS
    reach: float = 1.0
    calibrate: tuple[AdapterChoice, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= _MOST_RANK:
            raise UsageError("--lora-slots", got=self.rank, expected=f"1 to {_MOST_RANK}", fix="Use --lora-slots 16.")
        if not 0 < self.reach <= 100:
            raise UsageError("--lora-reach", got=self.reach, expected="above 0, at most 100", fix="Use 1.")

    @classmethod
    def parse(
        cls, rank: int | None, targets: str | None, reach: float | None, calibrate: Sequence[str] = ()
    ) -> LoraOptions | None:
        """Read the options; None without `--lora-slots`.

        Raises:
            UsageError: a value out of range, an unknown projection, or an option without `--lora-slots`.
        """
        if rank is None:
            for option, value in (
                ("--lora-targets", targets),
                ("--lora-reach", reach),
                ("--lora-calibrate", next(iter(calibrate), None)),
            ):
                if value is not None:
                    fix = "Add --lora-slots RANK, or leave it out."
                    raise UsageError(option, got=f"{value} without --lora-slots", expected="--lora-slots", fix=fix)
            return None
        adapters = tuple(AdapterChoice.parse("--lora-calibrate", each) for each in calibrate)
        return cls(rank, _targets(targets), 1.0 if reach is None else reach, adapters)

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
        if device.arch < _LEAST_ARCH:
            raise UsageError(
                "--lora-slots",
                got=f"{device.soc} (V{device.arch})",
                expected=f"V{_LEAST_ARCH} or later, which multiplies by 16-bit inputs",
                fix="Merge the adapter with --lora, or choose a later device.",
            )

    def slots(self, spec: DecoderSpec) -> LoraSlots:
        """The slots of a decoder."""
        return LoraSlots.of(spec, self.rank, self.targets)


def _targets(text: str | None) -> tuple[LoraTarget, ...]:
    if text is None:
        return LORA_TARGETS
    names: Sequence[str] = [name.strip() for name in text.split(",")]
    known = tuple(target for target in LORA_TARGETS if target in names)
    if unknown := [name for name in names if name not in LORA_TARGETS]:
        wanted = ", ".join(LORA_TARGETS)
        raise UsageError("--lora-targets", got=repr(unknown[0]), expected=wanted, fix="Use --lora-targets q,v.")
    return known
