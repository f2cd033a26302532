"""Rotary position embedding: the angle of each pair of elements, per position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgekv.spec.config import Config

Parameters = Mapping[str, "float | tuple[float, ...]"]

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_SUPPORTED = ("default", "linear", "llama3", "longrope")
_OLDER_NAMES = {"su": "longrope"}


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotary embedding resolved: pair i at position p is turned by p * inverse_frequencies[i] radians.

    Attributes:
        inverse_frequencies: float64 `[R/2]`.
        attention_factor: multiplies cosines and sines.
    """

    inverse_frequencies: NDArray[np.float64]
    attention_factor: float


@dataclass(frozen=True, slots=True)
class Rope:
    """What a checkpoint says of a rotary embedding.

    Attributes:
        rope_type: `default`, `linear`, `llama3` or `longrope`.
        theta: the base.
        width: R, how many elements of a head turn; those after them stay as they are.
        parameters: what belongs to the type, by the checkpoint's own names.
    """

    rope_type: str
    theta: float
    width: int
    parameters: Parameters

    @classmethod
    def from_config(cls, config: Config, head_dim: int, *, theta: float = 1e4) -> Rope:
        """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before it).

        Args:
            config: the model's configuration.
            head_dim: D.
            theta: the architecture's own base, where the configuration names none.

        Raises:
            CheckpointError: the type is not supported, or a number is missing or cannot be so.
        """
        table = config.table("rope_parameters" if "rope_parameters" in config else "rope_scaling")
        return cls.from_table(table, config, head_dim, theta=config.number("rope_theta", theta))

    @classmethod
    def from_table(cls, table: Config, config: Config, head_dim: int, *, theta: float) -> Rope:
        """Reads one table of rope parameters; `config` is asked for what some checkpoints keep beside it.

        Raises:
            CheckpointError: the type is not supported, or a number is missing or cannot be so.
        """
        share = table.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
        width = int(head_dim * share)
        if width % 2 or not 0 < width <= head_dim:
            wanted = f"a share of head_dim = {head_dim} that is an even number of elements"
            raise table.refusal("partial_rotary_factor", wanted, got=f"{share:g}, which is {width} elements")
        theta = table.number("rope_theta", theta)
        name = table.text("rope_type", table.text("type", "default"))
        rope_type = _OLDER_NAMES.get(name, name)
        if rope_type == "default":
            return cls(rope_type, theta, width, {})
        if rope_type == "linear":
            return cls(rope_type, theta, width, {"factor": table.number("factor")})
        if rope_type == "llama3":
            return cls(rope_type, theta, width, {each: table.number(each) for each in _LLAMA3})
        if rope_type == "longrope":
            return cls(rope_type, theta, width, _longrope(table, config, width))
        raise table.refusal(
            "rope_type", " or ".join(_SUPPORTED), got=repr(name), fix="It cannot be exported: choose another."
        )

    def rotation(self, tokens: int) -> Rotation:
        """The embedding of a sequence of so many tokens: `longrope` alone depends on it.

        The base formula is that of Su et al. 2021 (arXiv 2104.09864). `linear` divides every frequency by the factor.
        `llama3` stretches the slow pairs as Meta's reference implementation of Llama 3.1 does: wavelengths above
        original/low_freq_factor are divided by the factor, those below original/high_freq_factor stay, those between
        are blended. `longrope` (arXiv 2402.13753) divides each by a factor of its own, of the list `short_factor` up
        to the original context and of `long_factor` beyond it.
        """
        exponents = -np.arange(0, self.width, 2, dtype=np.float64) / self.width
        plain: NDArray[np.float64] = self.theta**exponents
        if self.rope_type == "linear":
            return Rotation(plain / self._number("factor"), 1.0)
        if self.rope_type == "llama3":
            return Rotation(plain * self._llama3_share(plain), 1.0)
        if self.rope_type == "longrope":
            long = tokens > self._number("original_max_position_embeddings")
            factors = np.asarray(self.parameters["long_factor" if long else "short_factor"], np.float64)
            return Rotation(plain / factors, self._number("attention_factor"))
        return Rotation(plain, 1.0)

    def _llama3_share(self, plain: NDArray[np.float64]) -> NDArray[np.float64]:
        factor, low, high, original = (self._number(name) for name in _LLAMA3)
        turns = original * plain / (2 * math.pi)  # over the original context
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        share: NDArray[np.float64] = kept + (1 - kept) / factor
        return share

    def _number(self, name: str) -> float:
        value = self.parameters[name]
        assert isinstance(value, float), "lists are read by name"
        return value


def _longrope(table: Config, config: Config, width: int) -> Parameters:
    name = "original_max_position_embeddings"
    original = (config if name in config else table).number(name)
    factor = table.number("factor", config.number("max_position_embeddings") / original)
    growth = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "short_factor": table.numbers("short_factor", width // 2),
        "long_factor": table.numbers("long_factor", width // 2),
        name: original,
        "factor": factor,
        "attention_factor": table.number("attention_factor", growth),
    }
