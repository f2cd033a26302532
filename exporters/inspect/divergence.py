"""The first result in which two traces of one decoder differ, and the probable cause."""

from __future__ import annotations

import re

import msgspec
import numpy as np

from edgekv.errors import UsageError
from exporters.inspect.trace import Trace
from exporters.quantize.reference import Floats

PERFECT_DB = 200.0
_CLEARER_DB = 12.0  # a hypothesis must explain the difference better by this much
_LEVELS = 256

_ROTARY_PRODUCTS = (".cos", ".sin")
_LAYER = re.compile(r"^(?:layers\.|past_(?:key|value)_|[a-z_]+_state_)(\d+)")


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two traces.

    Attributes:
        results: number of results compared.
        first: the first result whose SQNR is below the limit, or None.
        layer: the layer of `first`, if it belongs to one.
        sqnr_db: SQNR of `first`, dB.
        before: the result before `first`.
        before_db: SQNR of `before`, dB.
        cause: the probable cause.
        token: the first token whose row of `first` is below the limit.
        worst: the results with the lowest SQNR, in dB.
    """

    results: int
    first: str | None
    layer: int | None
    sqnr_db: float | None
    before: str | None
    before_db: float | None
    cause: str | None
    token: int | None
    worst: list[tuple[str, float]]


def sqnr_db(reference: Floats, other: Floats) -> float:
    """Signal-to-quantization-noise ratio: 10 log10(power of reference / power of difference), at most `PERFECT_DB`."""
    signal = float(np.square(reference, dtype=np.float64).sum())
    noise = float(np.square(other.astype(np.float64) - reference).sum())
    if not np.isfinite(noise):
        return -PERFECT_DB
    return float(10 * np.log10(max(signal, 1e-30) / max(noise, max(signal, 1e-30) * 10 ** (-PERFECT_DB / 10))))


def find_divergence(a: Trace, b: Trace, *, limit_db: float = 20.0, most: int = 10) -> Divergence:
    """Compare the results that both traces have, in the order of `a`.

    Args:
        a: the trace to compare with, such as that of the reference.
        b: the trace to check.
        limit_db: two results differ if their SQNR is below this, dB.
        most: number of results to list as worst.

    Raises:
        UsageError: they share no result, or a result differs in shape.
    """
    names = [name for name in a if name in b]
    if not names:
        raise UsageError(
            "traces", got="no result in both", expected="results of one model", fix="Trace the same checkpoint."
        )
    for name in names:
        if a[name].shape != b[name].shape:
            raise UsageError(
                name,
                got=f"{list(a[name].shape)} and {list(b[name].shape)}",
                expected="one shape in both",
                fix="Trace the same model on the same tokens.",
            )
    levels = {name: sqnr_db(a[name], b[name]) for name in names}
    worst = sorted(levels.items(), key=lambda item: item[1])[:most]
    at = next((i for i, name in enumerate(names) if levels[name] < limit_db), None)
    if at is None:
        return Divergence(
            results=len(names), first=None, layer=None, sqnr_db=None, before=None, before_db=None, cause=None,
            token=None, worst=worst,
        )  # fmt: skip
    first = names[at]
    before = names[at - 1] if at else None
    rows = [sqnr_db(x, y) < limit_db for x, y in zip(a[first], b[first], strict=True)]
    match = _LAYER.match(first)
    return Divergence(
        results=len(names),
        first=first,
        layer=int(match[1]) if match else None,
        sqnr_db=levels[first],
        before=before,
        before_db=levels[before] if before else None,
        cause=_cause(first, a[first], b[first], levels[first]),
        token=rows.index(True) if True in rows else None,
        worst=worst,
    )


def _cause(name: str, a: Floats, b: Floats, level_db: float) -> str:
    if not np.isfinite(b).all():
        return "NaN or infinite values"
    if not b.any():
        return "nothing was written: all values are 0"
    factor = float(np.vdot(a, b)) / max(float(np.vdot(a, a)), 1e-30)
    if sqnr_db(a * np.float32(factor), b) > level_db + _CLEARER_DB:
        return f"scale: the values are {factor:.4g} x the expected ones"
    is_rotated = ".rotated" in name or name.startswith("past_key_")
    if is_rotated and a.shape[1] % 2 == 0 and (rope := _rope_cause(a, b, level_db)):
        return rope
    if (steps := _grid(b)) and (is_rotated or name.startswith("past_value_")):
        return f"KV bits: the values take only {steps} evenly spaced levels"
    if name.endswith(".attention") or ".attention." in name:
        return "mask (or softmax): queries, keys and values still agree"
    if np.abs(b).max() < 0.99 * np.abs(a).max() and _is_clipped(a, b):
        return f"range: the values are clipped at {np.abs(b).max():.4g}; expected up to {np.abs(a).max():.4g}"
    if name.endswith(_ROTARY_PRODUCTS):
        return "RoPE: the input agrees, its products with cos or sin do not (base, scaling or position)"
    return "weights or encoding of this result: its inputs agree"


def _rope_cause(a: Floats, b: Floats, level_db: float) -> str | None:
    """RoPE rotates pairs (i, i + D/2): it keeps their lengths and leaves position 0 unchanged."""
    length_a, length_b = (np.hypot(*np.split(pairs, 2, axis=1)) for pairs in (a, b))
    if sqnr_db(length_a, length_b) > level_db + _CLEARER_DB:
        return "RoPE: pairs keep their length but are rotated by another angle (base, scaling or position)"
    if len(a) > 1 and sqnr_db(a[:1], b[:1]) > sqnr_db(a[1:], b[1:]) + _CLEARER_DB:
        return "RoPE: position 0 agrees, the others do not (pairing of elements, or the cos/sin table)"
    return None


def _grid(values: Floats) -> int | None:
    """The number of levels if the values are on a coarse uniform grid."""
    levels = np.unique(values)
    if not 2 <= len(levels) <= _LEVELS:
        return None
    gaps = np.diff(levels)
    step = gaps.min()
    return len(levels) if np.allclose(gaps / step, np.round(gaps / step), atol=1e-2) else None


def _is_clipped(a: Floats, b: Floats) -> bool:
    limit = np.abs(b).max()
    inside = np.abs(a) < 0.98 * limit
    return bool(inside.any()) and sqnr_db(a[inside], b[inside]) > sqnr_db(a, b) + _CLEARER_DB
