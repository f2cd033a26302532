"""Text form of the layer report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from exporters.inspect.propose import Proposal
from exporters.inspect.report import Kind, LayersReport

_COLUMN = 15
_PLURALS: dict[Kind, str] = {"weight": "weights", "activation": "activations", "key": "K", "value": "V"}


def layer_lines(report: LayersReport) -> Iterator[str]:
    """One line per layer, then the worst tensors."""
    kinds = get_args(Kind)
    yield "SQNR against float32 in dB, minimum / mean:"
    yield _row("", [_PLURALS[kind] for kind in kinds])
    for layer in report.layers:
        cells = [layer.levels.get(kind) for kind in kinds]
        yield _row(
            f"layer {layer.place}" if layer.place.isdecimal() else layer.place,
            ["-" if cell is None else f"{cell.least_db:.1f} / {cell.mean_db:.1f}" for cell in cells],
        )
    yield "largest own quantization error, suggestion, and (SQNR including the error of all inputs):"
    for each in report.worst:
        yield f"  {each.own_db:5.1f} dB  {each.name}: {each.suggestion} ({each.sqnr_db:.1f} dB)"


def proposal_lines(proposal: Proposal, file: str) -> Iterator[str]:
    """What a suggested recipe changes, and the expected gain."""
    yield f"{file}: int8 for {len(proposal.promotions)} more matrices"
    for each in proposal.promotions:
        yield f"  {each.tensor}: {each.nats:.5f} nats a token for {each.bytes:,} bytes"
    ratio = proposal.expected_bytes / proposal.weights_bytes
    yield f"  weights {proposal.weights_bytes:,} -> {proposal.expected_bytes:,} bytes, {ratio:.3f} x"
    yield f"  KL divergence due to weights {proposal.nats:.4f} -> {proposal.expected_nats:.4f} nats a token (expected)"


def _row(head: str, cells: list[str]) -> str:
    return f"  {head:<12}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)
