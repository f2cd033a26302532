"""A report as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

from devices.report import Report
from edgekv.conformance.show import expectations, first_in_words, in_words
from exporters.inspect.page import write_html
from exporters.inspect.page.charts import LineChart, Point, Series
from exporters.inspect.page.template import find_template

GENERATOR = "edgekv conformance"


def write_page(file: Path, report: Report) -> None:
    """Write the page; the file appears atomically, and replaces an earlier page.

    Raises:
        UsageError: something else is there, or the file cannot be written.
    """
    write_html(file, render_page(report), GENERATOR)


def render_page(report: Report) -> str:
    """The page as text."""
    heat = [
        Point(sample.at_s, sample.celsius, f"{sample.celsius:.1f} C") for sample in report.samples if sample.celsius
    ]
    speed = [
        Point(sample.at_s, sample.tokens_per_s, f"{sample.tokens_per_s:.1f} tokens/s") for sample in report.samples
    ]
    return find_template("exporters.conformance", "page.html.j2").render(
        report=report,
        generator=GENERATOR,
        differing=[(result.name, in_words(result)) for result in report.graphs if result.verdict != "equal"],
        first={result.name: first_in_words(result.first) for result in report.graphs if result.first is not None},
        speeds=[(speed, "; ".join(expectations(report, speed))) for speed in report.speeds],
        heat=LineChart.of([Series("hottest sensor", heat)]) if len(heat) > 1 else None,
        decode=LineChart.of([Series("tokens/s", speed)]) if len(speed) > 1 else None,
    )
