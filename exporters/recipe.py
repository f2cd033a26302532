"""How a checkpoint becomes integers."""

from __future__ import annotations

from dataclasses import dataclass

from edgekv.errors import UsageError
from quant import Dtype


@dataclass(frozen=True, slots=True)
class Recipe:
    """Integer types by role.

    Attributes:
        name: what the user writes.
        activations: type of every activation.
        weight_bits: bits of a weight, one scale for each output channel.
    """

    name: str
    activations: Dtype
    weight_bits: int


RECIPES = (Recipe("w8a16", activations="u16", weight_bits=8),)


def find_recipe(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        UsageError: there is none.
    """
    for recipe in RECIPES:
        if recipe.name == name:
            return recipe
    known = " or ".join(recipe.name for recipe in RECIPES)
    raise UsageError("--recipe", found=repr(name), wanted=known, way_out="Choose one of these.")
