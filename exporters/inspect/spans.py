"""Results whose range one token spans: the attention sink, or another token with massive activations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tokenizers import Tokenizer

from exporters.inspect.meters import ResultMeter
from exporters.inspect.report import TokenSpan
from exporters.quantize.sink import SPANS
from quant import Encoding


def find_spans(results: Mapping[str, ResultMeter], tokenizer: Tokenizer) -> Iterator[TokenSpan]:
    """The results in which one token's magnitudes are over `SPANS` times those of all others.

    Keys and values are left out: they have ranges of their own, and few rows.
    """
    for name, meter in results.items():
        peak = None if name.startswith("past_") else meter.peak
        if peak is None or peak.magnitude <= SPANS * peak.others:
            continue
        dtype, seen = meter.encoding.dtype, meter.range.seen
        steps = (Encoding.asymmetric(*limits, dtype).scale for limits in (seen, (peak.low, peak.high)))
        yield TokenSpan(
            name=name,
            position=peak.position,
            token=peak.token,
            text=tokenizer.decode([peak.token], skip_special_tokens=False),
            magnitude=peak.magnitude,
            others=peak.others,
            seen=seen,
            without=(peak.low, peak.high),
            cost_db=20 * math.log10(next(steps) / next(steps)),
        )
