"""Options of the engine `htp`: how fast and with how much power the HTP runs, and how it is compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, Self, get_args

from devices import Device
from edgekv.errors import UsageError
from edgekv.qnn.vendor_libraries import Platform

Performance = Literal[
    "burst",
    "sustained_high_performance",
    "high_performance",
    "balanced",
    "low_balanced",
    "high_power_saver",
    "power_saver",
    "low_power_saver",
    "extreme_power_saver",
]
Priority = Literal["low", "normal", "normal_high", "high"]

FASTEST: Final = "fastest"

_MAX_LATENCY_US = 1_000_000
_MAX_DEVICES = 16
_FLAGS = {"yes": True, "no": False}


@dataclass(frozen=True, slots=True)
class HtpOptions:
    """Options of the engine `htp`. None leaves the choice to Qualcomm's provider.

    The provider ignores names and values that it does not know, so they are checked here.

    Attributes:
        performance: clock and voltage; `burst` is the fastest. It polls for results too, which the provider does by
            itself and has no option for.
        rpc_latency_us: the latency that calls between processor and HTP may have.
        priority: of this process among those that use the HTP.
        vtcm_mb: tightly coupled memory that graphs may use, MiB; at most that of the chip. When graphs are compiled.
        optimization: 1 to 3, how long the compiler searches for a fast graph; or `fastest`, the level whose graphs the
            compiler simulates as the fastest. When graphs are compiled.
        device_id: which HTP of several.
        shared_memory: allocate the KV cache in memory that processor and HTP share. Needs an NPU and FastRPC; `auto`
            takes ordinary memory without them.
        mapped_weights: map the weights of binaries from their files. Only Windows on Arm64 can.

    Raises:
        UsageError: a value that the provider does not know.
    """

    performance: Performance | None = None
    rpc_latency_us: int | None = None
    priority: Priority | None = None
    vtcm_mb: int | None = None
    optimization: int | Literal["fastest"] | None = None
    device_id: int | None = None
    shared_memory: bool | Literal["auto"] = False
    mapped_weights: bool = True

    def __post_init__(self) -> None:
        _check_name("performance", self.performance, get_args(Performance))
        _check_name("priority", self.priority, get_args(Priority))
        _check_number("rpc-latency", self.rpc_latency_us, 0, _MAX_LATENCY_US, "microseconds")
        _check_number("vtcm", self.vtcm_mb, 1, 1024, "MiB")
        if self.optimization != FASTEST:
            _check_number("optimization", self.optimization, 1, 3, "level")
        _check_number("device", self.device_id, 0, _MAX_DEVICES - 1, "number")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `KEY=VALUE,KEY=VALUE`, such as `performance=burst,vtcm=8`.

        Raises:
            UsageError: an unknown or repeated key, or a value that it cannot have.
        """
        options: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = (part.strip() for part in item.partition("="))
            if key not in _KEYS:
                raise UsageError("htp", got=repr(key), expected=", ".join(_KEYS), fix="Give KEY=VALUE,KEY=VALUE.")
            name, kind = _KEYS[key]
            if name in options:
                raise UsageError(f"htp {key}", got="given twice", expected="once", fix="Leave one out.")
            if (key, value) == ("optimization", FASTEST):
                options[name] = value
            else:
                options[name] = value if kind is str else _number(key, value) if kind is int else _flag(key, value)
        return cls(**options)

    @property
    def is_for_compiling(self) -> bool:
        """Whether an option takes effect only when graphs are compiled."""
        return self.vtcm_mb is not None or self.optimization is not None

    @property
    def provider_options(self) -> Mapping[str, str]:
        """As Qualcomm's provider names them; what it is to choose itself is left out.

        Raises:
            ValueError: the level is still to be found.
        """
        if self.optimization == FASTEST:
            raise ValueError("optimization: got fastest; expected the level that was found")
        options = {
            "htp_performance_mode": self.performance,
            "rpc_control_latency": self.rpc_latency_us,
            "qnn_context_priority": self.priority,
            "vtcm_mb": self.vtcm_mb,
            "htp_graph_finalization_optimization_mode": self.optimization,
            "device_id": self.device_id,
            "enable_htp_shared_memory_allocator": 1 if self.shared_memory is True else None,
            "disable_file_mapped_weights": None if self.mapped_weights else 1,
        }
        return MappingProxyType({name: str(value) for name, value in options.items() if value is not None})

    def check_for_compiling(self, device: Device) -> None:
        """Refuse what a chip does not have, and what takes effect only when graphs run.

        Raises:
            UsageError: such an option.
        """
        _check_number("vtcm", self.vtcm_mb, 1, device.vtcm_mb, f"MiB of {device.soc}")
        if self != HtpOptions(vtcm_mb=self.vtcm_mb, optimization=self.optimization):
            raise UsageError(
                "htp",
                got="options of running graphs for compiling them",
                expected="vtcm and optimization alone",
                fix="Give the others to the command that runs the bundle.",
            )

    def check(self, device: Device, on: Platform) -> None:
        """Refuse options that a chip or this machine does not have.

        Raises:
            UsageError: more VTCM than the chip has, or shared memory without an NPU.
        """
        _check_number("vtcm", self.vtcm_mb, 1, device.vtcm_mb, f"MiB of {device.soc}")
        if self.optimization == FASTEST:
            raise UsageError(
                "htp optimization",
                got=FASTEST,
                expected="1 to 3",
                fix="Give it to edgekv compile, which simulates the graphs at each level.",
            )
        if self.shared_memory is True and not on.has_npu:
            raise UsageError(
                "htp shared-memory",
                got=f"yes on {on.system} {on.machine}",
                expected="no: an emulated HTP has the processor's memory",
                fix="Leave it out.",
            )


_KEYS: Mapping[str, tuple[str, type]] = MappingProxyType(
    {
        "performance": ("performance", str),
        "rpc-latency": ("rpc_latency_us", int),
        "priority": ("priority", str),
        "vtcm": ("vtcm_mb", int),
        "optimization": ("optimization", int),
        "device": ("device_id", int),
        "shared-memory": ("shared_memory", bool),
        "mapped-weights": ("mapped_weights", bool),
    }
)


def _check_name(key: str, value: object, names: tuple[str, ...]) -> None:
    if value is not None and value not in names:
        raise UsageError(f"htp {key}", got=repr(value), expected=", ".join(names), fix="Leave it out for the default.")


def _check_number(key: str, value: int | str | None, minimum: int, maximum: int, unit: str) -> None:
    if value is not None and not (isinstance(value, int) and minimum <= value <= maximum):
        fix = "Leave it out for the default."
        raise UsageError(f"htp {key}", got=value, expected=f"{minimum} to {maximum} ({unit})", fix=fix)


def _number(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"htp {key}", got=repr(text), expected="a whole number", fix=f"Give {key}=NUMBER.") from None


def _flag(key: str, text: str) -> bool | str:
    if key == "shared-memory" and text == "auto":
        return text
    if text not in _FLAGS:
        expected = "yes, no or auto" if key == "shared-memory" else "yes or no"
        raise UsageError(f"htp {key}", got=repr(text), expected=expected, fix=f"Give {key}=yes.")
    return _FLAGS[text]
