"""Rotary position embedding: the angle of each pair of elements, per position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.spec.config import Config

_Number = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
Parameters = dict[str, _Number | tuple[_Number, ...]]
RopeType = Literal["default", "linear", "llama3", "longrope", "proportional", "yarn"]

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
_LISTS = ("short_factor", "long_factor")
_PARAMETERS: dict[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": _LLAMA3,
    "longrope": (*_LISTS, "original_max_position_embeddings", "factor", "attention_factor"),
    "proportional": ("partial_rotary_factor", "factor"),
    "yarn": (*_YARN, "truncate", "attention_factor"),
}
_OLDER_NAMES = {"su": "longrope"}
_FULL, _SLIDING = "full_attention", "sliding_attention"

THETA = 1e4
"""The base where a configuration and its architecture have none."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """A resolved rotary embedding: pair i at position p is rotated by p * inverse_frequencies[i] radians.

    Attributes:
        inverse_frequencies: float64 `[R/2]`.
        attention_factor: multiplies cosines and sines.
    """

    inverse_frequencies: NDArray[np.float64]
    attention_factor: float


class Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a rotary embedding, as a checkpoint gives them.

    Attributes:
        rope_type: `default`, `linear`, `llama3`, `longrope`, `proportional` or `yarn`.
        theta: the base.
        width: R, number of rotated elements of a head; the rest is unchanged.
        parameters: parameters of the type, by the checkpoint's names.
    """

    rope_type: RopeType
    theta: Annotated[float, msgspec.Meta(gt=0, le=1e12)]
    width: Annotated[int, msgspec.Meta(ge=2, le=1 << 24, multiple_of=2)]
    parameters: Parameters

    def __post_init__(self) -> None:
        if {*self.parameters} != {*(names := _PARAMETERS[self.rope_type])}:
            raise ValueError(f"parameters: got {', '.join(self.parameters) or 'none'}; expected {', '.join(names)}")
        lists = {name for name, value in self.parameters.items() if isinstance(value, tuple)}
        if lists != {*names} & {*_LISTS}:
            raise ValueError(f"parameters: got lists {', '.join(lists) or 'none'}; expected lists in {_LISTS} alone")
        if wrong := [name for name in lists if len(self._numbers(name)) != self.width // 2]:
            count = len(self._numbers(wrong[0]))
            raise ValueError(f"parameters: {wrong[0]}: got {count} values; expected {self.width // 2}, a pair each")

    @classmethod
    def from_config(cls, config: Config, head_dim: int, *, partial: bool = False) -> Rope:
        """Read `rope_scaling` (older) or `rope_parameters` (transformers 5), and `rope_theta` if they have none.

        `rope_scaling` replaces `rope_parameters`, as in transformers.

        Args:
            config: the model's configuration.
            head_dim: D.
            partial: whether the architecture can rotate a part of a head.

        Raises:
            CheckpointError: the type is not supported, or a number is missing or out of range.
        """
        scaling = config.table("rope_scaling")
        if scaling:
            config.ignore("rope_parameters")
        table = scaling or config.table("rope_parameters")
        return cls._read(table, config, head_dim, theta=config.number("rope_theta", THETA), partial=partial)

    @classmethod
    def pair(
        cls, config: Config, head_dim: int, *, theta: float, local_theta: float, local_head_dim: int | None = None
    ) -> tuple[Rope, Rope]:
        """The embeddings of layers with full attention and of layers with an attention window.

        Reads `rope_parameters` with an object for each kind of layer (transformers 5). Older configurations have
        `rope_scaling`, for full attention alone.

        Args:
            config: the model's configuration.
            head_dim: D.
            theta: base of the layers with full attention, if their object has none.
            local_theta: the same for layers with a window.
            local_head_dim: D of the layers with a window; None if it is the same.

        Raises:
            CheckpointError: the type is not supported, or a number is missing or out of range.
        """
        newer, scaling = config.table("rope_parameters"), config.table("rope_scaling")
        if newer and not any(newer.is_given(kind) for kind in (_FULL, _SLIDING)):
            raise config.refusal("rope_parameters", f"a table for {_FULL} and one for {_SLIDING}")
        if newer and scaling:
            raise config.refusal("rope_scaling", "nothing beside rope_parameters")
        if scaling and "rope_type" not in scaling:
            raise scaling.refusal("rope_type", "its name, which transformers reads here, but not `type`")
        full = scaling or newer.table(_FULL)
        return (
            cls._read(full, config, head_dim, theta=theta, nested=True),
            cls._read(newer.table(_SLIDING), config, local_head_dim or head_dim, theta=local_theta, nested=True),
        )

    @classmethod
    def _read(
        cls,
        table: Config,
        config: Config,
        head_dim: int,
        *,
        theta: float,
        partial: bool = False,
        nested: bool = False,
    ) -> Rope:
        """One object of rope parameters, and related fields that some checkpoints keep in `config`.

        Raises:
            CheckpointError: the type is not supported, or a number is missing or out of range.
        """
        theta = table.number("rope_theta", theta)
        share = table.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
        name = table.text("rope_type", table.text("type", "default"))
        rope_type = _OLDER_NAMES.get(name, name)
        if rope_type == "proportional" and 0 < share <= 1:
            parameters: Parameters = {"partial_rotary_factor": share, "factor": table.number("factor", 1.0)}
            return cls("proportional", theta, head_dim, parameters)
        where = table if "partial_rotary_factor" in table else config
        if share != 1 and not partial:
            raise where.refusal("partial_rotary_factor", "1, the only share of a head that this architecture rotates")
        width = int(head_dim * share)
        if width % 2 or not 0 < width <= head_dim:
            expected = f"a share of head_dim = {head_dim} that is an even number of elements"
            raise where.refusal("partial_rotary_factor", expected, got=f"{share:g}, which is {width} elements")
        if rope_type == "default":
            return cls("default", theta, width, {})
        if rope_type == "linear":
            return cls("linear", theta, width, {"factor": table.number("factor")})
        if rope_type == "llama3":
            parameters = {name: table.number(name) for name in _LLAMA3[:-1]}
            return cls("llama3", theta, width, parameters | {_LLAMA3[-1]: _original(table, config, nested=nested)})
        if rope_type == "longrope":
            original = _original(table, config, nested=nested)
            return cls("longrope", theta, width, _longrope(table, config, width, original))
        if rope_type == "yarn":
            if nested:  # transformers reads it beside the objects, where no file has it
                table.expect("truncate", True)
            return cls("yarn", theta, width, _yarn(table, config, _original(table, config, nested=nested)))
        raise table.refusal(
            "rope_type", " or ".join(get_args(RopeType)), got=repr(name), fix="It cannot be exported: choose another."
        )

    def rotation(self, tokens: int) -> Rotation:
        """The embedding for sequences of up to `tokens` tokens; only `longrope` depends on their number.

        The base formula is from Su et al. 2021 (arXiv 2104.09864). `linear` divides every frequency by the factor.
        `llama3` follows Meta's reference implementation of Llama 3.1: frequencies with wavelengths above
        original/low_freq_factor are divided by the factor, those below original/high_freq_factor are kept, those
        between are blended. `longrope` (arXiv 2402.13753) divides each frequency by its own factor: `short_factor` up
        to the original context, `long_factor` beyond it. `yarn` (arXiv 2309.00071) keeps pairs with more than beta_fast
        rotations over the original context, divides those below beta_slow rotations, and blends by pair number.
        `proportional` (Gemma 4, LFM3) keeps the first pairs, a share of all, and does not rotate the others.
        """
        exponents = -np.arange(0, self.width, 2, dtype=np.float64) / self.width
        plain: NDArray[np.float64] = self.theta**exponents
        if self.rope_type == "linear":
            return Rotation(plain / self.number("factor"), 1.0)
        if self.rope_type == "proportional":
            rotated = int(self.number("partial_rotary_factor") * self.width // 2)
            kept = np.where(np.arange(self.width // 2) < rotated, plain, 0.0)
            return Rotation(kept / self.number("factor"), 1.0)
        if self.rope_type == "llama3":
            return Rotation(plain * self._llama3_share(plain), 1.0)
        if self.rope_type == "longrope":
            long = tokens > self.number("original_max_position_embeddings")
            factors = np.asarray(self._numbers("long_factor" if long else "short_factor"), np.float64)
            return Rotation(plain / factors, self.number("attention_factor"))
        if self.rope_type == "yarn":
            return Rotation(plain * self._yarn_share(), self.number("attention_factor"))
        return Rotation(plain, 1.0)

    @property
    def original_context(self) -> int | None:
        """The longest text that `longrope` rotates by `short_factor`; None of other types."""
        name = "original_max_position_embeddings"
        return int(self.number(name)) if self.rope_type == "longrope" else None

    def _llama3_share(self, plain: NDArray[np.float64]) -> NDArray[np.float64]:
        factor, low, high, original = (self.number(name) for name in _LLAMA3)
        turns = original * plain / (2 * math.pi)  # over the original context
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        share: NDArray[np.float64] = kept + (1 - kept) / factor
        return share

    def _yarn_share(self) -> NDArray[np.float64]:
        factor, original, fast, slow = (self.number(name) for name in _YARN)

        def pair_with(turns: float) -> float:
            """The pair number with this many rotations over the original context."""
            return self.width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        first, last = pair_with(fast), pair_with(slow)
        if self.number("truncate"):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.width - 1)
        pairs = np.arange(self.width // 2, dtype=np.float64)
        divided = np.clip((pairs - first) / (last - first or 0.001), 0.0, 1.0)
        share: NDArray[np.float64] = (1 - divided) + divided / factor
        return share

    def number(self, name: str) -> float:
        """A parameter that is a number."""
        value = self.parameters[name]
        assert isinstance(value, (int, float)), "lists are read by name"
        return float(value)

    def _numbers(self, name: str) -> tuple[float, ...]:
        values = self.parameters[name]
        assert isinstance(values, tuple), "numbers are read by name"
        return values


def _original(table: Config, config: Config, *, nested: bool) -> float:
    """The original context; its field beside `rope_parameters` goes first if there is one table for all layers."""
    name = "original_max_position_embeddings"
    table.ignore(name)
    if not nested and name in config:
        return config.number(name)
    return table.number(name) if name in table else config.number("max_position_embeddings")


def _longrope(table: Config, config: Config, width: int, original: float) -> Parameters:
    factor = table.number("factor", config.number("max_position_embeddings") / original)
    growth = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "short_factor": table.numbers("short_factor", width // 2),
        "long_factor": table.numbers("long_factor", width // 2),
        "original_max_position_embeddings": original,
        "factor": factor,
        "attention_factor": table.number("attention_factor", growth),
    }


def _yarn(table: Config, config: Config, original: float) -> Parameters:
    """The parameters of `yarn`; `attention_factor` follows from `factor`, `mscale` and `mscale_all_dim` by default.

    `mscale` and `mscale_all_dim` count only together, and only if none is 0.
    """
    factor = table.number("factor", config.number("max_position_embeddings") / original)
    attention_factor = _yarn_scale(factor)
    scales = [table.zero_or_number(name) for name in ("mscale", "mscale_all_dim")]
    if all(scales):
        attention_factor = _yarn_scale(factor, scales[0]) / _yarn_scale(factor, scales[1])
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": table.number("beta_fast", 32.0),
        "beta_slow": table.number("beta_slow", 1.0),
        "truncate": float(table.flag("truncate", True)),
        "attention_factor": table.number("attention_factor", attention_factor),
    }


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0
