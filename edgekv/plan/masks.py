"""The size limit of attention masks for the HTP's Add.

A mask operand is `[1, 1, AR, P + AR]` of 16-bit integers, P past rows. On HTP V81 an int16 Add is reported to pair a
mask of more than 1 MiB with the wrong rows, so that some heads attend to future tokens (google-ai-edge/litert-torch
issue 1184 and pull request 1226, SM8850, QAIRT 2.47). The x86 emulator does not show it. Exactly 1 MiB is reported to
be right: AR 128 in a context of 4,096.
"""

from __future__ import annotations

from collections.abc import Sequence

from devices import Device
from edgekv.spec.geometry import Geometry
from edgekv.spec.layers import LayeredGeometry

MASK_BYTES = 1 << 20
"""The largest mask operand that is reported to be right."""

_ELEMENT_BYTES = 2
_REPORTED_ARCH = 81


def mask_bytes(geometry: Geometry | LayeredGeometry, ar: int) -> int:
    """Bytes of the largest mask operand of the AR-`ar` graph; each attention window has its own mask."""
    columns = max(group.past_rows(ar, geometry.context) for group in geometry.groups()) + ar
    return _ELEMENT_BYTES * ar * columns


def mask_warnings(geometry: Geometry | LayeredGeometry, ar: Sequence[int], device: Device) -> list[str]:
    """A sentence for each graph whose mask is above `MASK_BYTES`, with the AR to use instead.

    Args:
        geometry: of the cache for the longest context.
        ar: tokens per inference of each graph.
        device: the target.
    """
    context = geometry.context
    where = (
        f"HTP V{device.arch}" if device.arch == _REPORTED_ARCH else f"HTP V{_REPORTED_ARCH} (other versions: unknown)"
    )
    sentences = []
    for tokens in ar:
        safe = _safe_ar(geometry, tokens)
        fix = f"Use --ar with {safe} instead of {tokens}" if safe else "No AR is small enough: use a smaller --context"
        if (found_bytes := mask_bytes(geometry, tokens)) > MASK_BYTES:
            sentences.append(
                f"AR-{tokens} with a context of {context:,} has an attention mask of {found_bytes:,} bytes; above "
                f"{MASK_BYTES:,} the Add of {where} is reported to use wrong rows, which the emulator does not show. "
                f"{fix}."
            )
    return sentences


def _safe_ar(geometry: Geometry | LayeredGeometry, ar: int) -> int | None:
    """The largest smaller AR that divides the context and has a mask within the limit, if there is one."""
    context = geometry.context
    smaller = (tokens for tokens in range(ar - 1, 0, -1) if context % tokens == 0)
    return next((tokens for tokens in smaller if mask_bytes(geometry, tokens) <= MASK_BYTES), None)
