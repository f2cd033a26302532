"""`edgekv bench`: how fast a bundle runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgekv.cli.engine_options import HtpOption, TalkingModeOption, talking_mode
from edgekv.cli.numbers import parse_numbers
from edgekv.cli.output import print_json
from edgekv.cli.summary import engine_and_mode

if TYPE_CHECKING:
    from edgekv.bench import BenchReport


def bench(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.", show_default=False)],
    prompt_tokens: Annotated[
        str | None,
        typer.Option("--prompt-tokens", "-p", help="Lengths of prompts.", show_default="128,512, or the context"),
    ] = None,
    new_tokens: Annotated[
        str | None, typer.Option("--new-tokens", "-n", help="Numbers of tokens to decode.", show_default="128")
    ] = None,
    depth: Annotated[str, typer.Option("--depth", "-d", help="Tokens in the cache before.")] = "0",
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", help="Counted runs of each test.")] = 5,
    engine: Annotated[str, typer.Option(help="Where the graphs run: cpu or htp; litert or tflite.")] = "cpu",
    kv_update: Annotated[
        str | None,
        typer.Option(help="How the cache takes new rows; see `edgekv generate`.", show_default="slot"),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of an engine on the CPU.", show_default="all cores")
    ] = None,
    cpu_mode: TalkingModeOption = None,
    htp: HtpOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure prefill, decode, the time to the first token, and passes that check drafts.

    The tests are those of llama-bench: pp512 is prefill of 512 random tokens, tg128 decodes 128 tokens. The mean and
    standard deviation are of the counted runs; one more warms up.
    """
    prompts = None if prompt_tokens is None else parse_numbers("--prompt-tokens", prompt_tokens)
    new = None if new_tokens is None else parse_numbers("--new-tokens", new_tokens)
    depths = parse_numbers("--depth", depth)
    from edgekv.bench import DEFAULT_NEW_TOKENS, DEFAULT_PROMPT_TOKENS, BenchPlan, default_plan, run_bench
    from edgekv.loading import load
    from edgekv.prefix import StoreConfig

    plan = BenchPlan(prompts or DEFAULT_PROMPT_TOKENS, new or DEFAULT_NEW_TOKENS, depths, repetitions)
    mode = talking_mode(engine, cpu_mode)
    with load(
        bundle, engine, kv_update=kv_update, threads=threads, cpu_mode=mode, htp=htp, prefix_cache=StoreConfig()
    ) as model:
        chosen = default_plan(model, plan)
        report = run_bench(model, chosen, threads, lambda result: None)
    if as_json:
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
        for each in report.verify_passes:
            depth = f" @ d{each.n_depth}" if each.n_depth else ""
            spent = f"{each.avg_ns / 1e6:.2f} ± {each.stddev_ns / 1e6:.2f}"
            table.add_row(f"{each.n_rows} rows{depth}", spent, f"{each.steps:.2f}")
        console.print(table)
    table = Table()
    table.add_column("prompt")
    for name in ("cached", "first token, ms"):
        table.add_column(name, justify="right")
    for first in report.first_tokens:
        table.add_row(str(first.n_prompt), str(first.n_cached), f"{first.avg_ms:.2f} ± {first.stddev_ms:.2f}")
    console.print(table)
