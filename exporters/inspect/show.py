"""Text form of the layer report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from edgekv.bundle import QualityRecord
from exporters.inspect.propose import Proposal
from exporters.inspect.report import EncoderLayerLoss, Kind, LayersReport, TokenSpan
from exporters.inspect.tally import Evaluation

CHAT_LABELS = {"prose": "prose", "chat": "chat", "template": "chat's template"}
"""What is measured beside the text."""

_COLUMN = 15
_SPANS_SHOWN = 10
_PLURALS: dict[Kind, str] = {
    "weight": "weights",
    "activation": "activations",
    "key": "K",
    "value": "V",
    "state": "states",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of an evaluation, as text."""

    label: str
    value: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.label:<15} {self.value}{self.detail}"


def figures(result: Evaluation) -> list[Figure]:
    """The figures of an evaluation, in order."""
    ratio = f", {result.perplexity_ratio:.5f} +- {result.perplexity_ratio_error:.5f} x reference"
    first = "" if result.first_sqnr_db is None else f", {result.first_sqnr_db:.1f} at position 0"
    shown = [
        Figure("perplexity", f"{result.perplexity:.4f}", ratio),
        Figure("reference", f"{result.reference_perplexity:.4f}", " (float32)"),
        Figure(
            "KL divergence", f"{result.kl_nats:.5f}", f" nats a token, 99 % of tokens at most {result.kl_99_nats:.4f}"
        ),
        Figure("top-1 agreement", f"{result.top1_agreement:.2%}"),
        Figure("SQNR", f"{result.token_sqnr_db:.1f} dB", f" per token, {result.min_token_sqnr_db:.1f} at least{first}"),
    ]
    shown += [chat_figure(record) for record in result.chat]
    if (mode := result.agreement) is not None:
        shown.append(
            Figure(f"{mode.mode}, emulate", f"{mode.kl_nats:.5f}", f" nats a token, top-1 {mode.top1_agreement:.2%}")
        )
    if (words := result.words) is not None:
        ratio = f", {words.ratio:.5f} +- {words.ratio_error:.5f} x reference"
        shown += [
            Figure("word perplexity", f"{words.perplexity:.4f}", ratio),
            Figure("reference", f"{words.reference_perplexity:.4f}", " (float32)"),
            Figure("words", f"{words.words:,}", f" in {words.pages} of {words.pages_in_text} pages"),
        ]
    return shown


def chat_figure(record: QualityRecord) -> Figure:
    """The figures of a chat, or of its template's tokens, in one line."""
    detail = f"{record.kl_max_nats:.2g} at most; top-1 {record.top1_agreement:.2%}, {record.tokens} tokens"
    return Figure(CHAT_LABELS[record.text], f"{record.kl_nats:.2g}", f" nats a token, {detail}")


def layer_lines(report: LayersReport) -> Iterator[str]:
    """One line per layer, then the worst tensors."""
    kinds = [kind for kind in get_args(Kind) if any(kind in layer.levels for layer in report.layers)]
    yield "SQNR against float32 in dB per token, minimum / mean over tensors; position 0 apart:"
    with_first = any(layer.first is not None for layer in report.layers)
    yield _row("", [*(_PLURALS[kind] for kind in kinds), *(["position 0"] if with_first else [])])
    for layer in report.layers:
        cells = [*(layer.levels.get(kind) for kind in kinds), *([layer.first] if with_first else [])]
        yield _row(
            f"layer {layer.place}" if layer.place.isdecimal() else layer.place,
            ["-" if cell is None else f"{cell.min_db:.1f} / {cell.mean_db:.1f}" for cell in cells],
        )
    yield from _span_lines(report.spans)
    yield "largest own quantization error, suggestion, and (SQNR including the error of all inputs):"
    for loss in report.worst:
        yield f"  {loss.own_db:5.1f} dB  {loss.name}: {loss.suggestion} ({loss.sqnr_db:.1f} dB)"
    yield from encoder_lines(report.encoder)


def encoder_lines(layers: Sequence[EncoderLayerLoss]) -> Iterator[str]:
    """One line per layer of a vision encoder."""
    if not layers:
        return
    yield "vision encoder on a drawn picture, SQNR against float32 in dB per row, minimum / median; its worst matrix:"
    for layer in layers:
        place = f"layer {layer.place}" if layer.place.isdecimal() else layer.place
        cell = f"{layer.rows.min_db:.1f} / {layer.rows.mean_db:.1f}"
        yield f"{_row(place, [cell])}   {layer.worst.name} ({layer.worst.own_db:.1f} dB)"


def _span_lines(spans: Sequence[TokenSpan]) -> Iterator[str]:
    if not spans:
        return
    count = f"{len(spans)} results" if len(spans) > 1 else "1 result"
    shown = f", the {_SPANS_SHOWN} most costly" if len(spans) > _SPANS_SHOWN else ""
    yield f"one token spans the range of {count}{shown}:"
    for span in spans[:_SPANS_SHOWN]:
        yield (
            f"  {span.name}: {span.text!r} at position {span.position} reaches {number(span.magnitude)}, all others "
            f"{number(span.others)} ({number(span.ratio)} x)"
        )
        now, without = (f"{number(low)} to {number(high)}" for low, high in (span.seen, span.without))
        yield f"    range {now}, without it {without}: its steps cost {span.cost_db:.1f} dB"
    if any(span.position == 0 for span in spans):
        yield "  export with --sink auto, which keeps the first token out of the graphs"


def proposal_lines(proposal: Proposal, file: str) -> Iterator[str]:
    """What a suggested recipe changes, and the expected gain."""
    yield f"{file}: int8 for {len(proposal.promotions)} more matrices"
    for promotion in proposal.promotions:
        yield f"  {promotion.tensor}: {promotion.nats:.5f} nats a token for {promotion.bytes:,} bytes"
    ratio = proposal.expected_bytes / proposal.weights_bytes
    yield f"  weights {proposal.weights_bytes:,} -> {proposal.expected_bytes:,} bytes, {ratio:.3f} x"
    yield f"  KL divergence due to weights {proposal.nats:.4f} -> {proposal.expected_nats:.4f} nats a token (expected)"


def _row(head: str, cells: list[str]) -> str:
    return f"  {head:<12}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)


def number(value: float) -> str:
    """Four significant digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
