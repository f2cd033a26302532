"""The DRAM of a chip, which bounds how fast weights and cache can be read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Memory:
    """DRAM as the chip's memory controller drives it at its best.

    Attributes:
        kind: the JEDEC family, such as `LPDDR5X`.
        mega_transfers_per_s: 10^6 transfers a second on each pin; twice the clock that product briefs give in MHz.
        bus_bits: width of all channels together.
        confirmed: whether a public source states both transfer rate and width; otherwise the best known values.
    """

    kind: str
    mega_transfers_per_s: float
    bus_bits: int
    confirmed: bool = True

    def __post_init__(self) -> None:
        if self.mega_transfers_per_s <= 0:
            raise ValueError(f"mega_transfers_per_s: got {self.mega_transfers_per_s}; expected a number above 0")
        if self.bus_bits < 16 or self.bus_bits % 16:
            raise ValueError(f"bus_bits: got {self.bus_bits}; expected a multiple of 16, the width of an LPDDR channel")

    @property
    def gb_per_s(self) -> float:
        """Peak bandwidth, 10^9 bytes a second: transfer rate x bytes of the bus."""
        return self.mega_transfers_per_s * self.bus_bits / 8 / 1000

    def __str__(self) -> str:
        return f"{self.kind}-{self.mega_transfers_per_s:g}, {self.bus_bits} bit"
