"""Speed of language models that Qualcomm publishes: package qai-hub-models 0.65.0, `perf.yaml` of each model.

`python -m benchmarks.published_speed` writes the file. None of these figures were measured with edgekv.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from devices.catalogue import CATALOGUE
from devices.device import Device

PUBLISHED_SOURCE = "qai-hub-models 0.65.0"
FILE = Path(__file__).with_name("published.csv")
COLUMNS = ("model", "billions", "precision", "device", "runtime", "unit", "context", "prefill", "decode")

_SOCS = {
    "Samsung Galaxy S26": "SM8850",
    "Samsung Galaxy S25": "SM8750",
    "Dragonwing Q-8750": "SM8750",
    "Snapdragon X Elite CRD": "SC8380XP",
    "Dragonwing IQ-X7181": "SC8380XP",
    "Snapdragon X2 Elite CRD": "SC8480XP",
    "Dragonwing IQ-9075 EVK": "QCS9100",
    "Arduino VENTUNO Q": "QCS8275",
    "SA8255P ADP": "SA8255",
    "SA8295P ADP": "SA8295",
    "SA8650P ADP": "SA8650P",
    "SA8775P ADP": "SA8775P",
}
_NPU = "npu"


@dataclass(frozen=True, slots=True)
class PublishedSpeed:
    """A published measurement.

    Attributes:
        model: name of the model in the package.
        billions: its parameters, 10^9, as its name says.
        precision: of its weights and activations.
        soc: part number of the chip.
        device: that was measured.
        runtime: `genie`, `geniex_qairt`, `geniex_llamacpp` or `qnn_context_binary`.
        unit: `npu`, `gpu` or `cpu`.
        context: S, tokens.
        prefill_tokens_per_s: None if it is not published.
        decode_tokens_per_s: of one sequence.
    """

    model: str
    billions: float
    precision: str
    soc: str
    device: str
    runtime: str
    unit: str
    context: int
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float


@cache
def published_speeds() -> Sequence[PublishedSpeed]:
    """All rows."""
    with FILE.open(newline="") as file:
        return tuple(
            PublishedSpeed(
                model=row["model"],
                billions=float(row["billions"]),
                precision=row["precision"],
                soc=_SOCS[row["device"]],
                device=row["device"],
                runtime=row["runtime"],
                unit=row["unit"],
                context=int(row["context"]),
                prefill_tokens_per_s=float(row["prefill"]) if row["prefill"] else None,
                decode_tokens_per_s=float(row["decode"]),
            )
            for row in csv.DictReader(file)
        )


def nearest_published(parameters: int, context: int, device: Device) -> Sequence[PublishedSpeed]:
    """The figures on the NPU of the published model that is nearest in size, on this chip or the nearest with figures.

    Args:
        parameters: of the model, its head and embeddings included.
        context: S, tokens; the nearest published one is taken.
        device: the chip. Nearest is the HTP version, then the bandwidth of the DRAM.

    Returns:
        The fastest row of each runtime.
    """
    rows = [row for row in published_speeds() if row.unit == _NPU]
    chips = [chip for chip in CATALOGUE if any(row.soc == chip.soc for row in rows)]
    chip = min(
        chips,
        key=lambda chip: (
            chip.soc != device.soc,
            abs(chip.arch - device.arch),
            abs(chip.dram_gb_per_s - device.dram_gb_per_s),
        ),
    )
    rows = [row for row in rows if row.soc == chip.soc]
    size = min({row.billions for row in rows}, key=lambda billions: abs(math.log(billions * 1e9 / parameters)))
    runtimes = {row.model: set[str]() for row in rows if row.billions == size}
    for row in rows:
        if row.model in runtimes:
            runtimes[row.model].add(row.runtime)
    model = max(runtimes, key=lambda name: len(runtimes[name]))
    rows = [row for row in rows if row.model == model]
    fastest = []
    for runtime in dict.fromkeys(row.runtime for row in rows):
        own = [row for row in rows if row.runtime == runtime]
        fastest.append(min(own, key=lambda row: (abs(row.context - context), -row.decode_tokens_per_s)))
    return fastest
