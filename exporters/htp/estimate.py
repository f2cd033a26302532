"""How fast graphs would be on the HTP: what the compiler's simulation of a proxy says. Nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from devices import Device, Proxy
from edgekv.machine.scratch import scratch_folder
from edgekv.qnn.options import HtpOptions
from edgekv.qnn.worker import HtpStep
from exporters.htp.check import run_steps
from exporters.htp.compile import COMPILER_DEFAULTS, context_steps, with_level
from exporters.htp.costs import Costs, read_costs
from exporters.htp.schedule import Schedule, read_schedules

_PROFILE, _LOG = "costs.csv", "costs_qnn.log"
"""The provider adds the end of the second name to the first."""


class Simulation(msgspec.Struct, frozen=True):
    """The simulated run of one graph."""

    costs: Costs
    schedule: Schedule


def options_on(proxy: Proxy, device: Device, options: HtpOptions = COMPILER_DEFAULTS) -> HtpOptions:
    """The options of the compiler with which a proxy stands for a device: with no more VTCM than that has."""
    vtcm_mb = min(options.vtcm_mb or device.vtcm_mb, proxy.vtcm_mb)
    return replace(options, vtcm_mb=None if vtcm_mb == proxy.vtcm_mb else vtcm_mb)


def simulate(models: Sequence[Path], proxy: Proxy, options: HtpOptions = COMPILER_DEFAULTS) -> list[Simulation]:
    """Compile graphs for a proxy into one binary, as they ship, and read what the compiler simulates of each.

    Args:
        models: the ONNX files.
        proxy: the chip.
        options: of the compiler, see `options_on`.

    Raises:
        EngineError: the compiler is missing, refused a graph or crashed, or writes something else.
    """
    with scratch_folder("estimate") as folder:
        if len(models) > 1:
            wrappers = [f"{number}.onnx" for number in range(len(models))]
            steps = context_steps(models, wrappers, folder, options)
        else:
            level = dict(with_level(options).provider_options)
            steps = [HtpStep(model=str(model), provider_options=level) for model in models]
        places, profiled = [], []
        for number, step in enumerate(steps):
            places.append(place := folder.absolute() / str(number))
            place.mkdir()
            profiling = {
                "profiling_level": "optrace",
                "profiling_file_path": str(place / _PROFILE),
                "dump_json_qnn_graph": "1",
                "json_qnn_graph_dir": str(place),
            }
            options_of = step.provider_options | profiling
            profiled.append(
                msgspec.structs.replace(
                    step, model=str(Path(step.model).absolute()), folder=str(place), provider_options=options_of
                )
            )
        run_steps(proxy, profiled)
        costs = read_costs(places[0] / _PROFILE, len(models))
        schedules = read_schedules(places[0] / _LOG, places)
    return [Simulation(*both) for both in zip(costs, schedules, strict=True)]
