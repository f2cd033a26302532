"""Finding a device by any of its names."""

from __future__ import annotations

import difflib

from devices.catalogue import CATALOGUE
from devices.device import Device

# Words that tell no two names apart; phones of other makers need theirs (`13` would be two phones).
_PREFIXES = ("qualcomm", "snapdragon", "dragonwing", "samsung")
_NEAR = 3


class UnknownDeviceError(LookupError):
    """No device has this name.

    Attributes:
        got: the name that was asked for.
        near: names that look like it, each with its part number if it is an alias.
        expected: all part numbers.
    """

    def __init__(self, got: str) -> None:
        self.got = got
        self.near = _near(got)
        self.expected = tuple(device.soc for device in CATALOGUE)
        near = f" Did you mean {' or '.join(self.near)}?" if self.near else ""
        super().__init__(
            f"device: got {got!r}; expected one of {', '.join(self.expected)}, or a name that one is sold under.{near}"
        )


def find(name: str) -> Device:
    """The device with this part number or alias, compared without case, spaces, punctuation or maker.

    Raises:
        UnknownDeviceError: no device has this name.
    """
    device = _BY_KEY.get(_key(name))
    if device is None:
        raise UnknownDeviceError(name)
    return device


def _letters(name: str) -> str:
    """`Snapdragon 7+ Gen 3` -> `snapdragon7plusgen3`: the plus sign is all that tells some chips apart."""
    return "".join(c for c in name.casefold().replace("+", "plus") if c.isalnum())


def _key(name: str) -> str:
    """`Snapdragon 7+ Gen 3` -> `7plusgen3`."""
    key = _letters(name)
    while prefix := next((p for p in _PREFIXES if key.startswith(p)), None):
        key = key.removeprefix(prefix)
    return key


def _names() -> list[tuple[str, Device]]:
    return [(name, device) for device in CATALOGUE for name in (device.soc, *device.aliases)]


_BY_KEY: dict[str, Device] = {_key(name): device for name, device in _names()}


def _near(name: str) -> tuple[str, ...]:
    """The names most like this one, one for each device."""
    names = {_letters(spelled): (spelled, device) for spelled, device in _names()}
    names |= {_key(spelled): (spelled, device) for spelled, device in _names()}
    best: dict[str, str] = {}
    for key in difflib.get_close_matches(_letters(name), names, n=len(names), cutoff=0.6):
        spelled, device = names[key]
        best.setdefault(device.soc, spelled if spelled == device.soc else f"{spelled} ({device.soc})")
    return tuple(best.values())[:_NEAR]
