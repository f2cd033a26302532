"""The subject of a plan: a cache, the graphs that share it, and the known sizes of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgekv.errors import UsageError
from edgekv.plan.options import Overrides, option, shortened
from edgekv.spec import (
    Decoder,
    DecoderSpec,
    EncoderSpec,
    Geometry,
    KvDtype,
    LayeredGeometry,
    Role,
    RotaryInputs,
    Weights,
)

_KV_DTYPES: dict[int, KvDtype] = {8: "u8", 16: "s16"}


@dataclass(frozen=True, slots=True)
class Subject:
    """A cache, its graphs and its model.

    Attributes:
        source: source of the sizes, as text.
        geometry: the sizes of the cache.
        ar: tokens per inference of the graphs that decode and prefill, ascending, with 1; all are below the context.
        weights_bytes: bytes of the weights, or None if they are unknown.
        max_positions: the model's maximum context, or None if it is unknown.
        assumptions: assumed values that were not given, one sentence each.
        decoder: all sizes of the model, or None if they are unknown.
        weights: the weights in pieces, or None if they are unknown.
        splits: number of parts of a bundle's layers; None if it is still to be chosen.
        rotary: the rotary embeddings that the graphs have inputs for.
        host_bytes: a table that the host alone reads, mapped; not among the weights.
        encoder: of pictures; not among the weights either. None if there is none.
        verify: tokens per inference of the graphs that verify drafts, ascending.
    """

    source: str
    geometry: Geometry | LayeredGeometry
    ar: tuple[int, ...]
    weights_bytes: int | None
    max_positions: int | None
    assumptions: tuple[str, ...]
    decoder: Decoder | None = None
    weights: Weights | None = None
    splits: int | None = None
    rotary: tuple[RotaryInputs, ...] = (RotaryInputs("", 1),)
    host_bytes: int = 0
    encoder: EncoderSpec | None = None
    verify: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.ar != tuple(sorted(set(self.ar))) or not self.ar or self.ar[0] != 1:
            raise ValueError(f"ar: got {self.ar}; expected 1 and larger numbers, ascending")
        for group in self.geometry.groups():
            group.past_rows(self.ar[-1], self.geometry.context)

    @property
    def graphs(self) -> list[tuple[Role, int]]:
        """Role and tokens per inference of each graph that devices run."""
        plain: list[tuple[Role, int]] = [("decode" if ar == 1 else "prefill", ar) for ar in self.ar]
        return [*plain, *(("verify", ar) for ar in self.verify)]

    @property
    def steps(self) -> tuple[int, ...]:
        """Tokens per inference of all of these graphs, ascending."""
        return tuple(sorted({*self.ar, *self.verify}))


def cache_geometry(
    layers: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    kv_dtype: KvDtype,
    windows: tuple[int | None, ...] = (),
) -> Geometry | LayeredGeometry:
    """The geometry of layers that attend to the whole context, or to `windows` if there are any."""
    if not windows:
        return Geometry(layers, kv_heads, head_dim, context, kv_dtype)
    return LayeredGeometry(layers, context, (kv_heads,), (head_dim,), windows, kv_dtype)


def kv_dtype_of(bits: int) -> KvDtype:
    """The integer type of a cache of 8 or 16 bits.

    Raises:
        UsageError: neither 8 nor 16.
    """
    dtype = _KV_DTYPES.get(bits)
    if dtype is None:
        raise UsageError("--kv-bits", got=shortened(bits), expected="8 (u8) or 16 (s16)", fix="Use --kv-bits 8.")
    return dtype


def checked_ar(ar: Sequence[int], context: int, windows: tuple[int | None, ...] = ()) -> tuple[int, ...]:
    """The AR numbers, ascending, without duplicates.

    Raises:
        UsageError: 1 is not among them, or one is not below the context and every attention window.
    """
    listed = shortened(",".join(map(str, ar)))
    if 1 not in ar or min(ar) < 1:
        wanted = "1 and larger numbers, such as 1,32"
        raise UsageError("--ar", got=listed, expected=wanted, fix="Add 1: it decodes.")
    if max(ar) >= context:
        raise UsageError(
            "--ar",
            got=f"{shortened(max(ar))} with a context of {context}",
            expected="numbers below the context",
            fix="Use a smaller --ar or a larger --context.",
        )
    narrowest = min((window for window in windows if window is not None), default=context)
    if max(ar) >= narrowest:
        raise UsageError(
            "--ar",
            got=f"{max(ar)} with an attention window of {narrowest}",
            expected="numbers below every attention window of the model",
            fix="Use a smaller --ar.",
        )
    return tuple(sorted(set(ar)))


def check_kernel(spec: DecoderSpec, context: int) -> None:
    """Check that a context exceeds the kernel of the model's convolutions, if it has any.

    Raises:
        UsageError: it does not.
    """
    states = spec.convolution_states
    if states is not None and states.kernel >= context:
        raise UsageError(
            "--context",
            got=context,
            expected=f"more than {states.kernel}, the kernel of the checkpoint's convolutions",
            fix="Use a longer --context.",
        )


def check_agreement(given: Overrides, found: Mapping[str, int], path: Path) -> None:
    """Reject options that contradict a file.

    Raises:
        UsageError: naming the first such option.
    """
    for name, value in found.items():
        chosen = getattr(given, name)
        if chosen is not None and chosen != value:
            raise contradiction(option(name), chosen, value, path)


def contradiction(name: str, found: object, wanted: object, path: Path) -> UsageError:
    """The error for an option that contradicts a file."""
    return UsageError(name, got=found, expected=f"{wanted}, as {path} says", fix="Leave it out.")


def host_sentence(size_bytes: int) -> str:
    """The assumption about a table of inputs of layers, in words."""
    return f"a table of {size_bytes:,} bytes apart: the host maps it, and reads the rows of the tokens that it runs"


def weights_sentence(size_bytes: int | None, basis: str) -> str:
    """The assumption about the weights, in words."""
    return "weights unknown, counted as 0 bytes" if size_bytes is None else f"weights of {size_bytes:,} bytes: {basis}"
