"""The chips whose schedule the HTP compiler simulates, and for which chips each stands."""

from __future__ import annotations

from dataclasses import dataclass

from devices.device import Device


@dataclass(frozen=True, slots=True)
class Proxy:
    """A chip for which the compiler of QAIRT 2.51 (in onnxruntime-qnn 2.7.0) has the cost of each operation.

    Attributes:
        soc: part number.
        soc_model: the QNN id that selects it.
        arch: HTP version.
        vtcm_mb: tightly coupled memory of the HTP, MiB.
        gb_per_s: the bandwidth at which the simulation reads weights, 10^9 bytes a second.
    """

    soc: str
    soc_model: int
    arch: int
    vtcm_mb: int
    gb_per_s: float


QCS9100 = Proxy("QCS9100", 77, 73, 8, 45.9)
SA8797 = Proxy("SA8797", 72, 81, 16, 67.8)

_OF_ARCH = {73: (QCS9100,), 75: (QCS9100,), 79: (QCS9100, SA8797), 81: (SA8797,)}


class NoProxyError(LookupError):
    """No chip that the compiler simulates stands for this one.

    Attributes:
        got: the chip and its HTP version.
        expected: the versions that a proxy stands for.
    """

    def __init__(self, device: Device) -> None:
        self.got = f"{device.soc} (V{device.arch})"
        self.expected = f"V{', V'.join(map(str, _OF_ARCH))}: the compiler has costs of operations for V73 and V81 alone"
        super().__init__(f"got {self.got}; expected {self.expected}")


def proxies_for(device: Device) -> tuple[Proxy, ...]:
    """The chips that stand for a device: of the same HTP version or the next older one, or those around it.

    Raises:
        NoProxyError: there is none.
    """
    if (proxies := _OF_ARCH.get(device.arch)) is None:
        raise NoProxyError(device)
    return proxies


def find_proxy(soc: str) -> Proxy:
    """The proxy of this part number.

    Raises:
        KeyError: there is none.
    """
    return {proxy.soc: proxy for proxy in (QCS9100, SA8797)}[soc]
