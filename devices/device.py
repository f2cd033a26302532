"""A chip that edgekv can target."""

from __future__ import annotations

from dataclasses import dataclass

from devices.memory import Memory


@dataclass(frozen=True, slots=True)
class Device:
    """One system on a chip.

    Attributes:
        soc: the part number, as it stands in a context binary (`soc_type`).
        soc_model: the QNN id that alone selects the target.
        arch: the version of the Hexagon Tensor Processor (73 for V73).
        vtcm_mb: tightly coupled memory of the HTP, MiB.
        memory: the fastest DRAM that the chip drives.
        source: where arch, VTCM and DRAM were read.
        aliases: marketing names and well-known products, compared without case, spaces or punctuation.
    """

    soc: str
    soc_model: int
    arch: int
    vtcm_mb: int
    memory: Memory
    source: str
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("soc_model", "arch", "vtcm_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; expected at least 1")

    @property
    def dram_gb_per_s(self) -> float:
        """Peak DRAM bandwidth, 10^9 bytes a second."""
        return self.memory.gb_per_s

    @property
    def memory_class(self) -> str:
        """The DRAM that the bandwidth is for, in words."""
        return str(self.memory)

    def supports_kv(self, kv_dtype: str) -> bool:
        """Whether the HTP multiplies by a cache of this type: 16-bit caches need V73."""
        return kv_dtype in ("u8", "s8") or self.arch >= 73
