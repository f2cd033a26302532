"""Names that people use for a chip but that do not name one of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OtherName:
    """A name that matches no device.

    Attributes:
        name: as it is sold.
        meaning: its meaning, as a sentence.
        fitting: similar names of the catalogue; empty if there are none.
    """

    name: str
    meaning: str
    fitting: tuple[str, ...] = ()


_X_PLUS = (
    "It is sold with two chips: with 10 cores (X1P-64-100, X1P-66-100) it is SC8380XP; with 8 cores (X1P-42-100, "
    "X1P-46-100) it is SC8340XP, which is not in the catalogue."
)
_SMALL_X = "It is SC8340XP, a smaller chip than Snapdragon X Elite, which is not in the catalogue."

_NO_HTP = "Its Hexagon is V66, which has no HTP: that begins with V68, in SM8350."

# Chips by number of cores: notebookcheck.net on X1P-42-100. SC8340XP: AI Hub Models, devices_and_chipsets.yaml.
OTHER_NAMES: tuple[OtherName, ...] = (
    OtherName("Snapdragon X Plus", _X_PLUS, ("X1P-64-100", "X1P-66-100")),
    OtherName("Snapdragon X", "It is a family of several chips.", ("Snapdragon X Elite", "X1P-64-100", "X1P-66-100")),
    OtherName("Snapdragon X Plus 8-Core", _SMALL_X),
    OtherName("X1P-42-100", _SMALL_X),
    OtherName("X1P-46-100", _SMALL_X),
    OtherName("X1-26-100", _SMALL_X),
    OtherName("SC8340XP", "It is the chip of Snapdragon X Plus with 8 cores, which is not in the catalogue."),
    OtherName("SM8250", _NO_HTP),
    OtherName("Snapdragon 865", _NO_HTP),
    OtherName("RB5", f"It has QRB5165, a variant of SM8250. {_NO_HTP}"),
    OtherName("QRB5165", f"It is a variant of SM8250. {_NO_HTP}"),
    OtherName("SA8775P", "It is an automotive chip that is not in the catalogue."),
    OtherName("Snapdragon X2", "It is a family of several chips.", ("Snapdragon X2 Elite",)),
)

# The first letters of names of phones and chips, and whose chips they are.
OTHER_MAKERS: tuple[tuple[str, str], ...] = (
    ("iPhone", "Apple"),
    ("iPad", "Apple"),
    ("Apple", "Apple"),
    ("Pixel", "Google"),
    ("Tensor", "Google"),
    ("Exynos", "Samsung"),
    ("Dimensity", "MediaTek"),
    ("MediaTek", "MediaTek"),
    ("Kirin", "HiSilicon"),
)
