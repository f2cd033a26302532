"""The chips that edgekv targets.

`soc_model`, arch and VTCM were read from context binaries that the HTP compiler of QAIRT 2.51 (in onnxruntime-qnn
2.7.0) wrote for that id; a test compiles a graph for each chip and reads them again. The compiler accepts ids of chips
without an HTP too, so only the chips listed here are offered.

A name names exactly one chip; `devices.other_names` explains those that do not. A phone that is sold with two makers'
chips is a mixed product of the one with an HTP. `speed` is the chip's own if figures were published for it, otherwise
that of the nearest HTP version.

Products: Galaxy S21 to S25, Galaxy Tab S8, Xiaomi 12 and 12 Pro as in AI Hub Models' devices_and_chipsets.yaml.
Laptops: names of Linux' device trees (x1e80100-*.dts, x1e78100-*.dts); some are sold with the 8-core chip too. The
other products, and which ones are mixed, are generally known but were not checked against a source.
"""

from __future__ import annotations

from devices.device import Device
from devices.memory import Memory
from devices.speed import QCS9100, SA8255, SC8380XP, SC8480XP, SM8650, SM8750, SM8850, V73

_BINARY = "arch and VTCM: read from a context binary (QAIRT 2.51)"


def _source(dram: str) -> str:
    return f"{_BINARY}; DRAM: {dram}"


CATALOGUE: tuple[Device, ...] = (
    Device(
        soc="SM8350",
        soc_model=30,
        arch=68,
        vtcm_mb=4,
        memory=Memory("LPDDR5", 6400, 64),
        speed=V73,
        source=_source("press reports of 3200 MHz; four channels in Linux' interconnect driver"),
        aliases=(
            "Snapdragon 888",
            "SM8350-AC",
            "Snapdragon 888+",
        ),
        products=(
            "Samsung Galaxy Z Fold3",
            "Samsung Galaxy Z Flip3",
            "Xiaomi Mi 11",
            "OnePlus 9",
            "OnePlus 9 Pro",
        ),
        mixed_products=(
            "Samsung Galaxy S21",
            "Samsung Galaxy S21+",
            "Samsung Galaxy S21 Ultra",
        ),
    ),
    Device(
        soc="SM8450",
        soc_model=36,
        arch=69,
        vtcm_mb=8,
        memory=Memory("LPDDR5", 6400, 64),
        speed=V73,
        source=_source("press reports of 3200 MHz and 51.2 GB/s; four channels in Linux' interconnect driver"),
        aliases=("Snapdragon 8 Gen 1",),
        products=(
            "Samsung Galaxy Tab S8",
            "Xiaomi 12",
            "Xiaomi 12 Pro",
            "OnePlus 10 Pro",
        ),
        mixed_products=(
            "Samsung Galaxy S22",
            "Samsung Galaxy S22+",
            "Samsung Galaxy S22 Ultra",
        ),
    ),
    Device(
        soc="SM8550",
        soc_model=43,
        arch=73,
        vtcm_mb=8,
        memory=Memory("LPDDR5X", 8400, 64),
        speed=V73,
        source=_source("press reports of 4200 MHz; four channels in Linux' interconnect driver"),
        aliases=(
            "SM8550-AB",
            "SM8550-AC",
            "Snapdragon 8 Gen 2",
            "Snapdragon 8 Gen 2 for Galaxy",
        ),
        products=(
            "Samsung Galaxy S23",
            "Samsung Galaxy S23+",
            "Samsung Galaxy S23 Ultra",
            "Samsung Galaxy Z Fold5",
            "Samsung Galaxy Z Flip5",
            "Samsung Galaxy Tab S9",
            "Xiaomi 13",
            "Xiaomi 13 Pro",
            "OnePlus 11",
        ),
    ),
    Device(
        soc="SM8650",
        soc_model=57,
        arch=75,
        vtcm_mb=8,
        memory=Memory("LPDDR5X", 9600, 64),
        speed=SM8650,
        source=_source("press reports of 4800 MHz; four channels in Linux' interconnect driver"),
        aliases=(
            "SM8650-AB",
            "SM8650-AC",
            "Snapdragon 8 Gen 3",
            "Snapdragon 8 Gen 3 for Galaxy",
        ),
        products=(
            "Samsung Galaxy S24 Ultra",
            "Samsung Galaxy Z Fold6",
            "Samsung Galaxy Z Flip6",
            "Xiaomi 14",
            "Xiaomi 14 Pro",
            "Xiaomi 14 Ultra",
            "OnePlus 12",
        ),
        mixed_products=(
            "Samsung Galaxy S24",
            "Samsung Galaxy S24+",
        ),
    ),
    Device(
        soc="SM8750",
        soc_model=69,
        arch=79,
        vtcm_mb=8,
        memory=Memory("LPDDR5X", 10600, 64),
        speed=SM8750,
        source=_source("press reports of 5300 MHz; four channels in Linux' interconnect driver"),
        aliases=(
            "SM8750-AB",
            "SM8750-AC",
            "Snapdragon 8 Elite",
            "Snapdragon 8 Elite for Galaxy",
        ),
        products=(
            "Samsung Galaxy S25",
            "Samsung Galaxy S25+",
            "Samsung Galaxy S25 Ultra",
            "Samsung Galaxy S25 Edge",
            "Samsung Galaxy Z Fold7",
            "Xiaomi 15",
            "Xiaomi 15 Pro",
            "Xiaomi 15 Ultra",
            "OnePlus 13",
        ),
    ),
    Device(
        soc="SM8850",
        soc_model=87,
        arch=81,
        vtcm_mb=8,
        memory=Memory("LPDDR5X", 10600, 64),
        speed=SM8850,
        source=_source("press reports of 5300 MHz from the launch; 64 bit from a third-party table of chips"),
        aliases=(
            "SM8850-AC",
            "Snapdragon 8 Elite Gen 5",
        ),
        products=(
            "Xiaomi 17",
            "Xiaomi 17 Pro",
            "OnePlus 15",
        ),
    ),
    Device(
        soc="SM8845",
        soc_model=97,
        arch=81,
        vtcm_mb=8,
        memory=Memory("LPDDR5X", 9600, 64, confirmed=False),
        speed=SM8850,
        source=_source("4800 MHz and 64 bit as in the maker's product brief, not confirmed"),
        aliases=("Snapdragon 8 Gen 5",),
    ),
    Device(
        soc="SM8735",
        soc_model=85,
        arch=73,
        vtcm_mb=8,
        memory=Memory("LPDDR5X", 9600, 64, confirmed=False),
        speed=V73,
        source=_source("4800 MHz from an encyclopedia of chips; 64 bit not confirmed"),
        aliases=("Snapdragon 8s Gen 4",),
        products=("Nothing Phone (3)",),
    ),
    Device(
        soc="SM8635",
        soc_model=68,
        arch=73,
        vtcm_mb=4,
        memory=Memory("LPDDR5X", 8400, 64),
        speed=V73,
        source=_source("press reports of 4200 MHz and four channels"),
        aliases=("Snapdragon 8s Gen 3",),
    ),
    Device(
        soc="SM7750",
        soc_model=86,
        arch=73,
        vtcm_mb=4,
        memory=Memory("LPDDR5X", 8400, 32, confirmed=False),
        speed=V73,
        source=_source("press reports of 4200 MHz; 32 bit not confirmed"),
        aliases=("SM7750-AB", "Snapdragon 7 Gen 4"),
    ),
    Device(
        soc="SM7675",
        soc_model=70,
        arch=73,
        vtcm_mb=4,
        memory=Memory("LPDDR5X", 8400, 64, confirmed=False),
        speed=V73,
        source=_source("press reports of 4200 MHz; 64 bit not confirmed"),
        aliases=("SM7675-AB", "Snapdragon 7+ Gen 3"),
    ),
    Device(
        soc="SM7635",
        soc_model=73,
        arch=73,
        vtcm_mb=2,
        memory=Memory("LPDDR5", 6400, 32),
        speed=V73,
        source=_source("a review's table: two 16-bit channels at 3200 MHz"),
        aliases=("Snapdragon 7s Gen 3",),
        products=(
            "Nothing Phone (3a)",
            "Nothing Phone (3a) Pro",
        ),
    ),
    Device(
        soc="SM7550",
        soc_model=64,
        arch=73,
        vtcm_mb=2,
        memory=Memory("LPDDR5", 6400, 32),
        speed=V73,
        source=_source("a review's table: two 16-bit channels at 3200 MHz"),
        aliases=("SM7550-AB", "Snapdragon 7 Gen 3"),
    ),
    Device(
        soc="SC8380XP",
        soc_model=60,
        arch=73,
        vtcm_mb=8,
        memory=Memory("LPDDR5X", 8448, 128),
        speed=SC8380XP,
        source=_source("press reports of 8448 MT/s and 135 GB/s; eight channels in Linux' interconnect driver"),
        aliases=(
            "Snapdragon X Elite",
            "X1E-00-1DE",
            "X1E-84-100",
            "X1E-80-100",
            "X1E-78-100",
            "X1P-66-100",
            "X1P-64-100",
        ),
        products=(
            "Surface Laptop 7",
            "Surface Pro 11",
            "Lenovo Yoga Slim 7x",
            "Lenovo ThinkPad T14s Gen 6 Snapdragon",
            "ASUS Vivobook S 15 Snapdragon",
            "Dell XPS 13 9345",
        ),
    ),
    Device(
        soc="SC8480XP",
        soc_model=88,
        arch=81,
        vtcm_mb=8,
        memory=Memory("LPDDR5X", 9523, 128),
        speed=SC8480XP,
        source=_source("press reports of 9523 MT/s and 152 GB/s; eight channels in Linux' interconnect driver"),
        aliases=("Snapdragon X2 Elite", "X2E-88-100", "X2E-80-100"),
    ),
    Device(
        soc="QCS8550",
        soc_model=66,
        arch=73,
        vtcm_mb=8,
        memory=Memory("LPDDR5X", 8400, 64, confirmed=False),
        speed=V73,
        source=_source("taken to be as on SM8550, whose drivers it shares in Linux; not confirmed"),
        aliases=("QCM8550",),
    ),
    Device(
        soc="QCS6490",
        soc_model=93,
        arch=68,
        vtcm_mb=2,
        memory=Memory("LPDDR5", 6400, 32, confirmed=False),
        speed=V73,
        source=_source(
            "two channels in Linux' interconnect driver; 3200 MHz as in the maker's product brief, not confirmed; "
            "boards with LPDDR4X reach 17 GB/s"
        ),
        aliases=("QCM6490",),
        products=(
            "RB3 Gen 2",
            "Rubik Pi 3",
            "Fairphone 5",
        ),
    ),
    Device(
        soc="QCS9100",
        soc_model=77,
        arch=73,
        vtcm_mb=8,
        memory=Memory("LPDDR5", 6400, 96),
        speed=QCS9100,
        source=_source("the maker's pages on the IQ-9075 evaluation kit: six 16-bit channels at 3200 MHz"),
        aliases=("QCS9075", "IQ-9075", "Dragonwing IQ9"),
    ),
    Device(
        soc="SA8255",
        soc_model=52,
        arch=73,
        vtcm_mb=8,
        memory=Memory("LPDDR5", 6400, 96),
        speed=SA8255,
        source=_source("a published comparison of cockpit chips: six 16-bit channels at 3200 MHz"),
        aliases=("SA8255P",),
    ),
    Device(
        soc="SA8295",
        soc_model=39,
        arch=68,
        vtcm_mb=8,
        memory=Memory("LPDDR4X", 4185.6, 128),
        speed=V73,
        source=_source("a published comparison of cockpit chips: eight 16-bit channels at 2092.8 MHz"),
        aliases=("SA8295P",),
    ),
)
