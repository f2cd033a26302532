"""The speed of a bundle on the HTP, simulated by Qualcomm's compiler; nothing is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.lazy import lazy

if TYPE_CHECKING:
    from exporters.estimate.decode_speed import DecodeSpeed
    from exporters.estimate.estimate import (
        Simulated,
        check_estimate,
        estimate_bundle,
        estimate_config,
        estimate_spec,
        fastest_level,
        simulate_bundle,
    )
    from exporters.estimate.page import GENERATOR, render_page, write_page

__all__ = [
    "GENERATOR",
    "DecodeSpeed",
    "Simulated",
    "check_estimate",
    "estimate_bundle",
    "estimate_config",
    "estimate_spec",
    "fastest_level",
    "render_page",
    "simulate_bundle",
    "write_page",
]

__getattr__ = lazy(
    __name__,
    {
        "decode_speed": "DecodeSpeed",
        "estimate": "Simulated check_estimate estimate_bundle estimate_config estimate_spec fastest_level "
        "simulate_bundle",
        "page": "GENERATOR render_page write_page",
    },
)
