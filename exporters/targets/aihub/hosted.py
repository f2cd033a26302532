"""The devices that AI Hub hosts, matched with the catalogue of chips."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from devices import CATALOGUE, Device, UnknownDeviceError, find
from edgekv.errors import UsageError
from exporters.targets.aihub.account import Account

_BY_MODEL = {device.soc_model: device for device in CATALOGUE}
_LIST = "See: edgekv hub devices"


@dataclass(frozen=True, slots=True)
class HostedDevice:
    """One device as the service describes it.

    Attributes:
        name: as the service calls it, such as `Samsung Galaxy S24 (Family)`.
        os: version of its operating system.
        attributes: `key:value` pairs, such as `soc-model:57`.
    """

    name: str
    os: str
    attributes: tuple[str, ...]

    @property
    def chip(self) -> Device | None:
        """The chip, if the catalogue has it."""
        values = [text.removeprefix("soc-model:") for text in self.attributes if text.startswith("soc-model:")]
        return next((_BY_MODEL[int(value)] for value in values if value.isdecimal() and int(value) in _BY_MODEL), None)

    @property
    def runs_qnn(self) -> bool:
        """Whether it runs context binaries and DLCs."""
        return "framework:qnn" in self.attributes

    @property
    def shares_weights(self) -> bool:
        """Whether linked graphs can share weights on it."""
        return "htp-supports-weight-sharing:true" in self.attributes

    @property
    def slug(self) -> str:
        """The name as a folder: `samsung_galaxy_s24_family`."""
        return re.sub(r"[^a-z0-9]+", "_", self.name.casefold().replace("+", " plus ")).strip("_")


@dataclass(frozen=True, slots=True)
class Target:
    """A hosted device whose chip edgekv knows."""

    hosted: HostedDevice
    chip: Device


def list_hosted(account: Account) -> list[HostedDevice]:
    """All devices of the service, in its order.

    Raises:
        ServiceError: the service did not answer, or refused the token.
    """
    with account.asking("listing devices") as client:
        return [HostedDevice(each.name, each.os, tuple(each.attributes)) for each in client.get_devices()]


def choose_targets(hosted: Sequence[HostedDevice], names: Sequence[str], kv_dtype: str) -> list[Target]:
    """The hosted devices of these names, each once.

    Args:
        hosted: the available devices.
        names: a device as the service calls it, or any name of a chip that the catalogue has. For a chip, a
            `(Family)` of devices is preferred: whichever of them is free serves.
        kv_dtype: integer type of the bundle's cache.

    Raises:
        UsageError: a name of no hosted device, or a device that cannot run the bundle.
        UnknownDeviceError: a name that neither the service nor the catalogue has.
    """
    targets = {target.hosted.slug: target for target in (_choose(hosted, name, kv_dtype) for name in names)}
    if not targets:
        raise UsageError("--devices", got="none", expected="at least one device", fix=_LIST)
    return list(targets.values())


def _choose(hosted: Sequence[HostedDevice], name: str, kv_dtype: str) -> Target:
    named = [each for each in hosted if each.name.casefold() == name.strip().casefold()]
    if named:
        chip = named[-1].chip  # the newest OS is last
        device = named[-1]
        if chip is None:
            raise UsageError(
                f"--devices {name}", got="a chip that edgekv does not know", expected=_chips(hosted), fix=_LIST
            )
    else:
        chip = _catalogued(hosted, name)
        same = [each for each in hosted if each.chip is chip and each.runs_qnn]
        if not same:
            raise UsageError(
                f"--devices {name}", got=f"no hosted device with {chip.soc}", expected=_chips(hosted), fix=_LIST
            )
        device = next((each for each in same if each.name.endswith("(Family)")), same[0])
    if not device.runs_qnn:
        raise UsageError(f"--devices {name}", got="a device without framework:qnn", expected=_chips(hosted), fix=_LIST)
    if not chip.supports_kv(kv_dtype):
        raise UsageError(
            f"--devices {name}",
            got=f"{chip.soc} (V{chip.arch})",
            expected=f"V73 or later, for the bundle's {kv_dtype} cache",
            fix="Export with --kv u8, or choose a later device.",
        )
    return Target(device, chip)


def _catalogued(hosted: Sequence[HostedDevice], name: str) -> Device:
    try:
        return find(name)
    except UnknownDeviceError:
        near = difflib.get_close_matches(name, [each.name for each in hosted], n=2)
        if not near:
            raise
        raise UsageError(f"--devices {name}", got="no such device", expected=" or ".join(near), fix=_LIST) from None


def _chips(hosted: Sequence[HostedDevice]) -> str:
    chips = sorted({each.chip.soc for each in hosted if each.chip is not None and each.runs_qnn})
    return f"a hosted device with one of {', '.join(chips)}"
