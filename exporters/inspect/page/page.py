"""Renders a layer report and its bundle as one self-contained HTML page."""

from __future__ import annotations

import platform
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from edgekv.bundle import Bundle
from edgekv.errors import UsageError
from edgekv.machine.scratch import atomic_file
from edgekv.plan import Overrides, find_subject, make_size_report
from exporters.inspect.page.charts import Bar, LineChart, Point, Series, treemap
from exporters.inspect.page.sizes import byte_shares, matrix_types
from exporters.inspect.page.template import find_template
from exporters.inspect.report import Kind, LayersReport, TensorLoss, ValueRange
from exporters.inspect.show import figures

GENERATOR = "edgekv eval"
_ACTIVATIONS_SHOWN, _CACHE_SHOWN = 24, 8
_ACTIVATIONS: tuple[Kind, ...] = ("activation",)
_CACHE: tuple[Kind, ...] = ("key", "value", "state")
_RESIDUAL = (("attention_add", 0.0), ("mlp_add", 0.5))
_KINDS: dict[Kind, str] = {
    "weight": "weights",
    "activation": "activations",
    "key": "keys",
    "value": "values",
    "state": "states",
}
_PACKAGES = ("edgekv", "numpy", "onnxruntime")


@dataclass(frozen=True, slots=True)
class RangeRow:
    """A result in the table of ranges: parts of its encoding's range."""

    name: str
    values: ValueRange
    seen: Bar
    central: Bar
    zero: Bar


def check_page_path(file: Path, generator: str = GENERATOR) -> None:
    """Check that a page can be written to a path: a new file, or one that this command wrote.

    Args:
        file: the path.
        generator: the command.

    Raises:
        UsageError: the name does not end with `.html`, the folder does not exist, or something else is there.
    """
    if file.suffix.lower() != ".html":
        raise UsageError("--html", got=f"{file}", expected="a name that ends in .html", fix="Add it.")
    if not file.parent.is_dir():
        got = f"no folder {file.parent}"
        raise UsageError("--html", got=got, expected="a folder that exists", fix="Make it first.")
    if file.is_symlink() or (file.exists() and not _is_page(file, generator)):
        fix = "Give another path, or remove the file yourself."
        expected = f"a new file, or a page of {generator}"
        raise UsageError("--html", got=f"{file}, which is something else", expected=expected, fix=fix)


def write_page(file: Path, bundle: Bundle, report: LayersReport) -> None:
    """Write the page of a report; see `write_html`."""
    write_html(file, render_page(bundle, report))


def write_html(file: Path, text: str, generator: str = GENERATOR) -> None:
    """Write a page; the file appears atomically, and replaces an earlier page of the command.

    Raises:
        UsageError: see `check_page_path`; or the file cannot be written.
    """
    check_page_path(file, generator)
    try:
        with atomic_file(file) as partial:
            partial.write_text(text, "utf-8")
    except OSError as error:
        expected = "a file that can be written"
        raise UsageError("--html", got=error.strerror, expected=expected, fix="Choose another place.") from None


def render_page(bundle: Bundle, report: LayersReport) -> str:
    """The page as text."""
    manifest = bundle.manifest
    shares = byte_shares(bundle)
    return find_template("exporters.inspect.page", "page.html.j2").render(
        name=bundle.path.name,
        manifest=manifest,
        report=report,
        figures=figures(report.evaluation),
        residual=_residual_chart(report),
        own=_own_chart(report.tensors),
        ranges=_range_rows(report.tensors, _ACTIVATIONS, _ACTIVATIONS_SHOWN),
        cache_ranges=_range_rows(report.tensors, _CACHE, _CACHE_SHOWN),
        kinds={kind: name for kind, name in _KINDS.items() if any(kind in layer.levels for layer in report.layers)},
        shares=shares,
        tiles=treemap([(share.name, share.kind, share.bytes) for share in shares]),
        total_bytes=sum(share.bytes for share in shares),
        matrices=matrix_types(manifest),
        size=make_size_report(find_subject(bundle.path, Overrides())),
        versions=[(package, _version(package)) for package in _PACKAGES] + [("Python", platform.python_version())],
    )


def _residual_chart(report: LayersReport) -> LineChart:
    losses = {loss.name: loss for loss in report.tensors}
    rest, first = list[Point](), list[Point]()
    for layer in range(len(report.layers) - 2):
        for name, offset in _RESIDUAL:
            loss = losses[f"layers.{layer}.{name}"]
            what = "attention" if name == "attention_add" else "MLP"
            title = f"layer {layer} after {what}"
            rest.append(Point(layer + offset, loss.sqnr_db, f"{title}: {loss.sqnr_db:.1f} dB"))
            if loss.first_db is not None:
                first.append(Point(layer + offset, loss.first_db, f"{title}, position 0: {loss.first_db:.1f} dB"))
    return LineChart.of([Series("all positions but 0", rest), Series("position 0", first)])


def _own_chart(losses: Sequence[TensorLoss]) -> LineChart:
    """The lowest own SQNR of each kind of tensor in each layer."""
    series = []
    for kind, name in _KINDS.items():
        worst: dict[int, TensorLoss] = {}
        for loss in losses:
            if loss.kind == kind and loss.layer is not None:
                other = worst.get(loss.layer, loss)
                worst[loss.layer] = min(loss, other, key=lambda weakest: weakest.own_db)
        points = [
            Point(layer, of_layer.own_db, f"{of_layer.name}: {of_layer.own_db:.1f} dB")
            for layer, of_layer in worst.items()
        ]
        if points:
            series.append(Series(name, points))
    return LineChart.of(series)


def _range_rows(losses: Sequence[TensorLoss], kinds: Collection[Kind], most: int) -> list[RangeRow]:
    """The tensors of these kinds with the most unused bits."""
    known = [(loss.name, loss.range) for loss in losses if loss.range is not None and loss.kind in kinds]
    known.sort(key=lambda named_range: -named_range[1].unused_bits)
    return [
        RangeRow(
            name=name,
            values=values,
            seen=Bar.of(values.seen, values.reach),
            central=Bar.of(values.central, values.reach),
            zero=Bar.of((0.0, 0.0), values.reach),
        )
        for name, values in known[:most]
    ]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _is_page(file: Path, generator: str) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return f'<meta name="generator" content="{generator}">'.encode() in opened.read(1024)
