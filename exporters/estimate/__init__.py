"""The speed of a bundle on the HTP, simulated by Qualcomm's compiler; nothing is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from exporters.estimate.decode_speed import DecodeSpeed as DecodeSpeed
    from exporters.estimate.estimate import (
        ScheduledEstimate as ScheduledEstimate,
        check_estimate as check_estimate,
        estimate_bundle as estimate_bundle,
        estimate_config as estimate_config,
        estimate_spec as estimate_spec,
        fastest_level as fastest_level,
        simulate_bundle as simulate_bundle,
    )
    from exporters.estimate.page import GENERATOR as GENERATOR, render_page as render_page, write_page as write_page

__getattr__, __all__ = lazy(__name__, __file__)
