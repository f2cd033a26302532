"""The speed of published language models on a chip, used to estimate speed from bandwidth.

`python -m benchmarks.published_speed` prints the bandwidths that follow from the rows of `published.csv`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The lowest and the highest of several measurements."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise ValueError(f"span: got {self.low} to {self.high}; expected two numbers above 0, ascending")


@dataclass(frozen=True, slots=True)
class DecoderSpeed:
    """Speed of integer decoders on an HTP, derived from published tokens per second and times to first token.

    Attributes:
        measured_on: part numbers of the chips that the figures were published for.
        gb_per_s: bandwidth at which a pass of one token reads weights and cache, 10^9 bytes a second.
        tera_macs_per_s: rate at which a pass of AR tokens computes those after the first, 10^12 multiply-adds a
            second: the arithmetic of AR tokens over the time that such a pass takes longer than one of one token.
        source: the publications.
        geniex_gb_per_s: as `gb_per_s`, with GenieX on QAIRT instead of Genie; None if there are no figures.
    """

    measured_on: tuple[str, ...]
    gb_per_s: Span
    tera_macs_per_s: Span
    source: str
    geniex_gb_per_s: Span | None = None


FASTEST_PASS_S = 1 / 1600
"""Seconds of the fastest published pass of any decoder: stories260K on SM8650, a floor of ExecuTorch's tests."""

_HUB = "Qualcomm AI Hub Models b61a009 (perf.yaml of the w4a16 models, context 4096, Genie)"
_ROWS = "qai-hub-models 0.65.0 (w4a16, context 4096)"
_EXECUTORCH = "ExecuTorch cff6f4d (floors of its static LLM tests, context 1024)"

SM8650 = DecoderSpeed(
    ("SM8650",), Span(29.0, 53.7), Span(8.1, 8.1), f"{_HUB}: Llama 2 7B, Phi-3.5-mini; {_EXECUTORCH}: Llama 3.2, SmolLM"
)
SM8750 = DecoderSpeed(
    ("SM8750",),
    Span(35.3, 75.0),
    Span(6.6, 17.0),
    f"{_HUB}: Llama 2, 3.1 and 3.2, Mistral, Qwen2 and 2.5, Phi-3.5, Falcon 3, Granite 3.1; "
    f"{_ROWS}: 9 models; {_EXECUTORCH}: Llama 3.2, SmolLM2, SmolLM3",
    Span(31.4, 78.4),
)
SM8850 = DecoderSpeed(
    ("SM8850",),
    Span(54.8, 76.8),
    Span(9.5, 21.0),
    f"{_HUB}: Llama 3.1 and 3.2, Falcon 3; {_ROWS}: 8 models",
    Span(35.2, 56.8),
)
SC8380XP = DecoderSpeed(
    ("SC8380XP",),
    Span(13.1, 49.1),
    Span(5.9, 23.1),
    f"{_HUB}: Llama 2, 3.1 and 3.2, Qwen2.5, Phi-3.5, Falcon 3, Granite 3.1; {_ROWS}: 11 models; "
    "GenieX issue 1266: Qwen3-4B",
    Span(20.6, 51.7),
)
SC8480XP = DecoderSpeed(
    ("SC8480XP",),
    Span(70.2, 98.4),
    Span(4.1, 12.5),
    f"{_HUB}: Llama 3.1 and 3.2; {_ROWS}: 11 models",
    Span(41.6, 101.4),
)
QCS9100 = DecoderSpeed(
    ("QCS9100",),
    Span(34.6, 52.1),
    Span(4.3, 8.6),
    f"{_ROWS}: 10 models; arithmetic of SA8775P, {_HUB}: Llama 3.2",
    Span(19.4, 45.6),
)
SA8255 = DecoderSpeed(
    ("SA8255", "SA8650P", "SA8775P"), Span(27.2, 37.4), Span(4.3, 8.6), f"{_HUB}: Llama 3.2; {_ROWS}: Llama 3.2"
)
V73 = DecoderSpeed(
    ("SC8380XP", "QCS9100", "SA8255", "SA8775P"),
    Span(13.1, 52.1),
    Span(4.3, 23.1),
    "the chips with a V73 that figures exist for",
    Span(19.4, 51.7),
)
