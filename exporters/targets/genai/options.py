"""Options of folders for onnxruntime-genai."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from devices import Device
from edgekv.errors import UsageError
from edgekv.option import Option, find_device


@dataclass(frozen=True, slots=True)
class GenaiOptions:
    """The options of a folder; without a device the graphs are left to ONNX Runtime on the CPU."""

    device: Annotated[
        Device | None,
        Option("Target chip of the engine htp: part number or name.", parse=find_device, shown="the bundle's"),
    ]
    pad_token: Annotated[
        int | None,
        Option(
            "Padding token: an id that no prompt contains.",
            "--pad-token-id",
            shown="the bundle's own, or an unused one",
        ),
    ] = None
    share_weights: Annotated[
        bool,
        Option("Write one binary with one copy of the weights. It runs on a Snapdragon, not on the emulator."),
    ] = False
    check: Annotated[
        bool, Option("Do not compare the graphs with the bundle's graphs.", "--skip-check", negates=True)
    ] = True

    def __post_init__(self) -> None:
        if self.share_weights and self.device is None:
            raise UsageError(
                "--share-weights",
                got="the option with the engine cpu",
                expected="the engine htp",
                fix="Leave it out: on the CPU the graphs always share their weights.",
            )

    @property
    def engine(self) -> str:
        return "cpu" if self.device is None else "htp"
