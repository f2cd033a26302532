"""`edgekv bench`: how fast a bundle runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from edgekv.bench.plan import BenchPlan
from edgekv.bench.report import BenchReport
from edgekv.cli.command import command
from edgekv.cli.model import BundleArgument, interactive
from edgekv.cli.output import Output, print_json
from edgekv.cli.summary import engine_and_mode
from edgekv.option import OptionGroup
from edgekv.prefix.config import StoreConfig
from edgekv.runtime.load_options import CacheOptions, EngineOptions


@command
def bench(
    bundle: BundleArgument,
    plan: Annotated[BenchPlan, OptionGroup("Tests")],
    cache: Annotated[CacheOptions, OptionGroup("Cache", only=("kv_update", "reserve", "kv_growth"))],
    engine: EngineOptions,
    output: Output,
) -> None:
    """The tests have the names of llama-bench's: pp512 is a prompt of 512 random tokens, tg128 decodes 128 tokens. All
    are greedy calls of generate. The mean and standard deviation are of the counted runs; one more warms up.
    """
    from edgekv.bench import default_plan, run_bench  # import the runtime, which --help does not need
    from edgekv.loading import open_model

    with open_model(bundle, interactive(engine), cache, StoreConfig()) as model:
        report = run_bench(model, default_plan(model, plan), engine.threads, lambda result: None)
    if output.as_json:
        print_json(report)
    else:
        _show(report)


def _show(report: BenchReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    threads = f"{report.threads or report.processor_count} threads"
    console.print(
        f"{Path(report.bundle).name}: {report.recipe}, context {report.context}, AR {', '.join(map(str, report.ar))}; "
        f"{engine_and_mode(report.engine)}, {report.kv_update}, {threads} of {report.processor}",
        soft_wrap=True,
    )
    table = Table()
    table.add_column("test")
    table.add_column("tokens/s", justify="right")
    for speed in report.speeds:
        table.add_row(speed.test, f"{speed.avg_ts:.2f} ± {speed.stddev_ts:.2f}")
    console.print(table)
    if report.verify_passes:
        table = Table()
        for name in ("verify", "ms a pass", "steps"):
            table.add_column(name, justify="left" if name == "verify" else "right")
        for verify_pass in report.verify_passes:
            depth = f" @ d{verify_pass.n_depth}" if verify_pass.n_depth else ""
            spent = f"{verify_pass.avg_ns / 1e6:.2f} ± {verify_pass.stddev_ns / 1e6:.2f}"
            table.add_row(f"{verify_pass.n_rows} rows{depth}", spent, f"{verify_pass.steps:.2f}")
        console.print(table)
    table = Table()
    table.add_column("prompt")
    for name in ("cached", "first token, ms"):
        table.add_column(name, justify="right")
    for first in report.first_tokens:
        table.add_row(str(first.n_prompt), str(first.n_cached), f"{first.avg_ms:.2f} ± {first.stddev_ms:.2f}")
    console.print(table)
