"""Rotary position embedding: the angle of each pair of elements, per position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import CheckpointError

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class Rope:
    """What a checkpoint says of its rotary embedding.

    Attributes:
        rope_type: `default` or `llama3`.
        theta: the base.
        parameters: the numbers that belong to the type, by the checkpoint's own names.
    """

    rope_type: str
    theta: float
    parameters: Mapping[str, float]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Rope:
        """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before it).

        Raises:
            CheckpointError: the type is not supported or a number is missing.
        """
        newer = config.get("rope_parameters")
        table = dict(newer or config.get("rope_scaling") or {})
        theta = table.pop("rope_theta", None) or config.get("rope_theta")
        if theta is None:
            raise CheckpointError(
                "config.json: rope_theta",
                found="neither rope_parameters.rope_theta nor rope_theta",
                wanted="the base of the rotary embedding",
                way_out="Add it to config.json; the model card names it.",
            )
        rope_type = table.pop("rope_type", None) or table.pop("type", None) or "default"
        if rope_type == "default":
            return cls("default", _number(theta, "rope_theta"), {})
        if rope_type != "llama3":
            raise CheckpointError(
                "config.json: rope_type",
                found=repr(rope_type),
                wanted="default or llama3",
                way_out="This kind of rotary embedding cannot be exported yet.",
            )
        missing = [name for name in _LLAMA3 if name not in table]
        if missing:
            raise CheckpointError(
                "config.json: rope parameters of type llama3",
                found=f"no {', '.join(missing)}",
                wanted=", ".join(_LLAMA3),
                way_out="Copy them from the original config.json: the factor differs between models (8 and 32 occur).",
            )
        return cls("llama3", _number(theta, "rope_theta"), {n: _number(table[n], n) for n in _LLAMA3})

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float64]:
        """`[D/2]`: pair i at position p is turned by p * this[i] radians.

        The base formula is that of Su et al. 2021 (arXiv 2104.09864); `llama3` stretches the slow pairs as
        Meta's reference implementation of Llama 3.1 does: wavelengths above original/low_freq_factor are
        divided by the factor, those below original/high_freq_factor stay, those between are blended.
        """
        plain: NDArray[np.float64] = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.rope_type == "default":
            return plain
        factor, low, high, original = (self.parameters[name] for name in _LLAMA3)
        turns = original * plain / (2 * math.pi)  # over the original context
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        stretched: NDArray[np.float64] = plain * (kept + (1 - kept) / factor)
        return stretched


def _number(value: object, name: str) -> float:
    if isinstance(value, (int, float)) and value > 0:
        return float(value)
    raise CheckpointError(
        f"config.json: {name}", found=repr(value), wanted="a number above 0", way_out="Correct config.json."
    )
