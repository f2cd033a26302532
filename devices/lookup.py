"""Finding a device by any of its names."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from devices.catalogue import CATALOGUE
from devices.device import Device
from devices.other_names import OTHER_MAKERS, OTHER_NAMES, OtherName

# Words that distinguish no two names; other makers' names are needed (`13` would be two phones).
_PREFIXES = ("qualcomm", "snapdragon", "dragonwing", "samsung", "galaxy", "google")
_NEAR = 3
_LONGEST_NAME = 80


class UnknownDeviceError(LookupError):
    """No device has this name.

    Attributes:
        got: the given name, shortened if it is very long.
        near: similar names, each with its part number if it is an alias.
        expected: all part numbers.
        expected_text: what was expected, in words; no other chips for a name that is known and means none of these.
        fix: the meaning of the name, if known, and what to use instead.
    """

    def __init__(self, got: str) -> None:
        self.got = got if len(got) <= _LONGEST_NAME else f"{got[:_LONGEST_NAME]}..."
        other = _other(got)
        self.near = _near(self.got) if other is None else tuple(_shown(name, find(name)) for name in other.fitting)
        self.expected = tuple(device.soc for device in CATALOGUE)
        self.expected_text = f"one of {', '.join(self.expected)}, or a name that one is sold under"
        if other is not None and not self.near:
            self.expected_text = "a chip with an HTP that the compiler supports"
        self.fix = _fix(other, self.near)
        super().__init__(f"device: got {self.got!r}; expected {self.expected_text}. {self.fix}")


@dataclass(frozen=True, slots=True)
class DeviceSearch:
    """What a search word means.

    Attributes:
        devices: the chips.
        others: names that it may mean too, but that are no chip of the catalogue.
    """

    devices: tuple[Device, ...]
    others: tuple[OtherName, ...] = ()


def find(name: str) -> Device:
    """The device with this part number or alias, compared without case, spaces, punctuation or maker.

    Raises:
        UnknownDeviceError: no device has this name.
    """
    device = _BY_KEY.get(_key(name))
    if device is None:
        raise UnknownDeviceError(name)
    return device


def search(word: str) -> DeviceSearch:
    """The chips whose names contain a word: the one that it names exactly, otherwise all.

    Args:
        word: part of a name, or an HTP version such as `V75`; an empty one finds all chips.

    Raises:
        UnknownDeviceError: nothing has such a name.
    """
    key = _key(word)
    if key in _BY_KEY:
        return DeviceSearch((_BY_KEY[key],))
    spelled = _letters(word)
    chips = tuple(other for other in OTHER_NAMES if other.meaning.startswith(f"{spelled.upper()}:"))
    if chips:  # of an HTP version that the compiler does not support
        return DeviceSearch((), chips)
    if key and (other := _other(word)) is not None:
        return DeviceSearch(tuple(dict.fromkeys(find(name) for name in other.fitting)), (other,))
    devices = tuple(
        device
        for device in CATALOGUE
        if spelled == f"v{device.arch}" or any(key in _key(name) for name in device.names)
    )
    others = tuple(other for known, other in _OTHER_BY_KEY.items() if key and key in known)
    if not devices and not others:
        raise UnknownDeviceError(word)
    return DeviceSearch(devices, others)


def _letters(name: str) -> str:
    """`Snapdragon 7+ Gen 3` -> `snapdragon7plusgen3`: the plus sign distinguishes some chips."""
    return "".join(c for c in name.casefold().replace("+", "plus") if c.isalnum())


def _key(name: str) -> str:
    """`Snapdragon 7+ Gen 3` -> `7plusgen3`."""
    key = _letters(name)
    while prefix := next((p for p in _PREFIXES if key.startswith(p)), None):
        key = key.removeprefix(prefix)
    return key


def _names() -> list[tuple[str, Device]]:
    return [(name, device) for device in CATALOGUE for name in device.names]


_BY_KEY: dict[str, Device] = {_key(name): device for name, device in _names()}
_OTHER_BY_KEY: dict[str, OtherName] = {_key(other.name): other for other in OTHER_NAMES}


def _other(name: str) -> OtherName | None:
    """What a name means that no device has, if that is known."""
    if (known := _OTHER_BY_KEY.get(_key(name))) is not None:
        return known
    maker = next((maker for first, maker in OTHER_MAKERS if _key(name).startswith(_key(first))), None)
    return None if maker is None else OtherName(name, f"Its chip is {maker}'s, not Qualcomm's.")


def _near(name: str) -> tuple[str, ...]:
    """The most similar names, one per device; those of one mistyped or two swapped characters come alone."""
    names = {_letters(spelled): (spelled, device) for spelled, device in _names()}
    names |= {_key(spelled): (spelled, device) for spelled, device in _names()}
    best: dict[str, str] = {}
    for key in names:
        if _is_mistyped(_letters(name), key):
            spelled, device = names[key]
            best.setdefault(device.soc, _shown(spelled, device))
    if best:
        return tuple(best.values())[:_NEAR]
    for key in difflib.get_close_matches(_letters(name), names, n=len(names), cutoff=0.6):
        spelled, device = names[key]
        best.setdefault(device.soc, _shown(spelled, device))
    return tuple(best.values())[:_NEAR]


def _is_mistyped(name: str, meant: str) -> bool:
    """Whether names differ in one character, or in the order of two neighbours."""
    if len(name) != len(meant):
        return False
    wrong = [at for at, (one, other) in enumerate(zip(name, meant, strict=True)) if one != other]
    if len(wrong) == 2:
        first, last = wrong
        return last == first + 1 and name[first : last + 1] == meant[first : last + 1][::-1]
    return len(wrong) == 1


def _shown(name: str, device: Device) -> str:
    return name if name == device.soc else f"{name} ({device.soc})"


def _fix(other: OtherName | None, near: tuple[str, ...]) -> str:
    names = " or ".join(near)
    if other is not None:
        return f"{other.meaning} Use {names}." if near else other.meaning
    return f"Did you mean {names}?" if near else "Use one of these."
