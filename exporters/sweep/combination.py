"""What a sweep compares: every combination of recipe, cache type, chip, context, split and rotation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import msgspec

from devices import Device
from edgekv.bundle import RotationName
from edgekv.errors import EdgeKVError
from edgekv.kv import KvDtype
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.options import ExportOptions
from exporters.plan import ExportPlan, plan_export
from exporters.preconditions import check_compiler
from exporters.quantize.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Combination:
    """One choice of each.

    Attributes:
        recipe: with its rotation.
        recipe_name: as it was given.
        kv: integer type of the cache.
        device: the chip.
        contexts: of the graphs.
        splits: number of parts; None for as few as the limits allow.
        rotation: that replaces the recipe's; None for its own.
    """

    recipe: Recipe
    recipe_name: str
    kv: KvDtype
    device: Device
    contexts: tuple[int, ...]
    splits: int | None = None
    rotation: RotationName | None = None

    @property
    def name(self) -> str:
        """Of its bundle."""
        parts = [self.recipe.name, self.kv, self.device.soc, "+".join(map(str, self.contexts))]
        if self.splits is not None:
            parts.append(f"split{self.splits}")
        return "-".join(parts)

    def options(self, template: ExportOptions) -> ExportOptions:
        """Of its export; what is not combined is that of the template.

        Raises:
            UsageError: they exclude each other.
        """
        return replace(
            template,
            device=self.device,
            recipe=self.recipe,
            context=self.contexts,
            kv_dtype=self.kv,
            splits=self.splits,
        )


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A combination that cannot be, or that failed, and why."""

    name: str
    reason: str


def combinations(
    recipes: Sequence[tuple[str, Recipe]],
    kv: Sequence[KvDtype],
    devices: Sequence[Device],
    contexts: Sequence[tuple[int, ...]],
    splits: Sequence[int | None] = (None,),
    rotations: Sequence[RotationName | None] = (None,),
) -> Iterator[Combination]:
    """All combinations, those that share the most next to each other."""
    for (recipe_name, recipe), rotation, dtype, lengths, parts, device in product(
        recipes, rotations, kv, contexts, splits, devices
    ):
        chosen = recipe
        if rotation is not None:
            chosen = msgspec.structs.replace(recipe, name=f"{recipe.name}-{rotation}", rotation=rotation)
        yield Combination(chosen, recipe_name, dtype, device, lengths, parts, rotation)


def sort_out(
    chosen: Sequence[Combination], checkpoint: Checkpoint, template: ExportOptions
) -> tuple[list[tuple[Combination, ExportPlan]], list[Refusal]]:
    """The combinations that can be exported, and the others with the reason, before any work.

    Raises:
        EngineError: the HTP compiler is wanted and not installed.
    """
    possible, refused, seen = list[tuple[Combination, ExportPlan]](), list[Refusal](), set[str]()
    for combination in chosen:
        if combination.name in seen:
            continue
        seen.add(combination.name)
        try:
            options = combination.options(template)
            export = plan_export(checkpoint, options)
        except EdgeKVError as error:
            refused.append(Refusal(name=combination.name, reason=str(error)))
            continue
        check_compiler(options)
        possible.append((combination, export))
    return possible, refused
