"""The table of a sweep."""

from __future__ import annotations

from collections.abc import Iterator

from edgekv.machine.system import format_bytes
from edgekv.plan.wording import span
from exporters.sweep.result import SweepReport

_HEADS = (
    "",
    "combination",
    "KL, nats",
    "chat",
    "template",
    "top-1",
    "perplexity ratio",
    "bytes",
    "RAM",
    "export",
    "tokens/s",
    "simulated",
)


def lines(report: SweepReport) -> Iterator[str]:
    """A line for each combination, then what was refused and what is recommended."""
    rows = [_HEADS]
    for result in report.results:
        quality = result.evaluation
        rows.append(
            (
                "*" if result.on_front else "",
                result.name,
                f"{quality.kl_nats:.5f}",
                result.lost_on("chat"),
                result.lost_on("template"),
                f"{quality.top1_agreement:.2%}",
                f"{quality.perplexity_ratio:.4f} +- {quality.perplexity_ratio_error:.4f}",
                format_bytes(result.bytes),
                format_bytes(result.ram_bytes),
                f"{result.export_seconds:.0f} s",
                span(*result.tokens_per_s),
                result.simulated_speed("decode"),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    for row in rows:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
    yield "*: no other of its chip and contexts has less KL in fewer bytes; tokens/s: as plan expects; none is measured"
    for refusal in report.refused:
        yield f"refused: {refusal.name}: {refusal.reason}"
    for refusal in report.failed:
        yield f"failed: {refusal.name}: {refusal.reason}"
    for choice in report.recommended:
        yield f"{choice.device}: {choice.name or 'no choice'}, {choice.reason}"
        if choice.command is not None:
            yield f"  {choice.command}"
        if choice.knee not in (None, choice.name):
            yield f"  the front of quality against bytes bends at {choice.knee}"
    yield (
        f"{report.pieces} pieces instead of {report.separate_pieces}, {report.done} done now in {report.seconds:.0f} s"
    )
