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


def _without_htp(soc: str, arch: int, *names: str) -> tuple[OtherName, ...]:
    """The names of a chip whose Hexagon is older than V68, the first with an HTP, and of what has it."""
    meaning = f"V{arch}: no HTP that this compiler supports."
    return (
        OtherName(soc, meaning),
        *(OtherName(name, f"Its Qualcomm chip is {soc}, {meaning}") for name in names),
    )


# Chips by number of cores: notebookcheck.net on X1P-42-100. SC8340XP, and which chip Galaxy Tab S7, Pixel 3, 3 XL, 4, 5
# and 5a have: AI Hub Models, devices_and_chipsets.yaml. V69 of SM8475: ExecuTorch, qc_schema.py. HTPs begin with V68:
# LiteRT, soc_table.h. V65 and V66 of single chips, and what else has them, were not checked against a source.
OTHER_NAMES: tuple[OtherName, ...] = (
    OtherName("Snapdragon X Plus", _X_PLUS, ("X1P-64-100", "X1P-66-100")),
    OtherName("Snapdragon X", "It is a family of several chips.", ("Snapdragon X Elite", "X1P-64-100", "X1P-66-100")),
    OtherName("Snapdragon X Plus 8-Core", _SMALL_X),
    OtherName("X1P-42-100", _SMALL_X),
    OtherName("X1P-46-100", _SMALL_X),
    OtherName("X1-26-100", _SMALL_X),
    OtherName("SC8340XP", "It is the chip of Snapdragon X Plus with 8 cores, which is not in the catalogue."),
    *_without_htp(
        "SM8250",
        66,
        "SM8250-AB",
        "SM8250-AC",
        "Snapdragon 865",
        "Snapdragon 865+",
        "Snapdragon 870",
        "Samsung Galaxy S20",
        "Samsung Galaxy S20+",
        "Samsung Galaxy S20 Ultra",
        "Samsung Galaxy Tab S7",
        "Xiaomi Mi 10",
        "OnePlus 8",
        "OnePlus 8 Pro",
    ),
    OtherName("V66", "It is older than V68, the first HTP that this compiler supports."),
    OtherName("V65", "It is older than V68, the first HTP that this compiler supports."),
    *_without_htp("QRB5165", 66, "RB5"),
    *_without_htp(
        "SM8150",
        66,
        "Snapdragon 855",
        "Snapdragon 855+",
        "Samsung Galaxy S10",
        "Samsung Galaxy S10+",
        "Google Pixel 4",
        "Google Pixel 4 XL",
        "OnePlus 7",
        "OnePlus 7 Pro",
    ),
    *_without_htp("SM7250", 66, "Snapdragon 765", "Snapdragon 765G", "Google Pixel 5", "Google Pixel 5a"),
    *_without_htp("SDM845", 65, "Snapdragon 845", "Google Pixel 3", "Google Pixel 3 XL"),
    OtherName(
        "SM8475",
        "It is not in the catalogue: its HTP is V69, and the compiler of QAIRT 2.51 writes binaries for V68.",
    ),
    *(
        OtherName(name, "It has SM8475, which is not in the catalogue.")
        for name in ("Snapdragon 8+ Gen 1", "Samsung Galaxy Z Fold4", "Samsung Galaxy Z Flip4")
    ),
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
