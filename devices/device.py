"""A chip that edgekv can target."""

from __future__ import annotations

from dataclasses import dataclass

from devices.memory import Memory
from devices.speed import DecoderSpeed, Span

# The largest share of its peak bandwidth that any published decoder on Genie reads at: Qwen3-1.7B on SM8850.
_LARGEST_SHARE = 0.906


@dataclass(frozen=True, slots=True)
class Device:
    """One system on a chip.

    Attributes:
        soc: the part number, as in a context binary (`soc_type`).
        soc_model: the QNN id that selects the target.
        arch: the version of the Hexagon Tensor Processor (73 for V73).
        vtcm_mb: tightly coupled memory of the HTP, MiB.
        memory: the fastest DRAM that the chip drives.
        speed: speed of published language models on this chip, or on the nearest one with published figures.
        source: where arch, VTCM and DRAM were read.
        aliases: marketing names and variants of the part, compared without case, spaces or punctuation, as all names.
        products: well-known phones, laptops and boards that have it.
        mixed_products: phones that have it in some countries, and another maker's chip in others.
    """

    soc: str
    soc_model: int
    arch: int
    vtcm_mb: int
    memory: Memory
    speed: DecoderSpeed
    source: str
    aliases: tuple[str, ...] = ()
    products: tuple[str, ...] = ()
    mixed_products: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("soc_model", "arch", "vtcm_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; expected at least 1")

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the part number first."""
        return (self.soc, *self.aliases, *self.products, *self.mixed_products)

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """Integer types of a cache that the HTP supports: 16-bit caches need V73."""
        return ("u8", "s8", "s16") if self.arch >= 73 else ("u8", "s8")

    @property
    def dram_gb_per_s(self) -> float:
        """Peak DRAM bandwidth, 10^9 bytes a second."""
        return self.memory.gb_per_s

    @property
    def decode_gb_per_s(self) -> Span:
        """Bandwidth at which decoders of the published kind read on this chip, 10^9 bytes a second."""
        max_gb_per_s = _LARGEST_SHARE * self.dram_gb_per_s
        return Span(min(self.speed.gb_per_s.low, max_gb_per_s), min(self.speed.gb_per_s.high, max_gb_per_s))

    @property
    def has_own_speed(self) -> bool:
        """Whether `speed` was published for this chip itself."""
        return self.soc in self.speed.measured_on

    def supports_kv(self, kv_dtype: str) -> bool:
        """Whether the HTP supports a cache of this type."""
        return kv_dtype in self.kv_dtypes
