"""`edgekv serve`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgekv.cli.engine_options import HtpOption, OnFullOption, ReproducibleOption, TalkingModeOption, talking_mode
from edgekv.cli.speculate_options import (
    DraftCorpusOption,
    DraftOption,
    DraftTokensOption,
    DraftTreeOption,
    SpeculateOption,
    SpeculateOptions,
)
from edgekv.cli.summary import engine_and_mode
from edgekv.errors import UsageError
from edgekv.serve.keys import KEY_VARIABLE, accepted_keys

if TYPE_CHECKING:
    from edgekv.serve import ServeOptions, Serving

_NEEDED = ("starlette", "uvicorn")


def serve(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.")] = 8080,
    engine: Annotated[str, typer.Option(help="Where the graphs run: cpu or htp; litert or tflite.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(help="Threads of an engine on the CPU.", show_default="all cores")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's id in the API.", show_default="the name of the folder")
    ] = None,
    max_sessions: Annotated[int, typer.Option(help="Conversations with a cache, running or idle.")] = 16,
    cache_budget: Annotated[
        str, typer.Option(help="Memory of all their caches: 64MiB, or 25% of the free memory.")
    ] = "50%",
    prefix_cache: Annotated[
        Path | None,
        typer.Option(help="Folder where computed prefixes outlive the server.", show_default="memory alone"),
    ] = None,
    on_full: OnFullOption = "drop-oldest",
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; further ones get 429.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds for a request, with its time in the queue.")] = 600.0,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="An accepted API key; other users of this machine can see it here, but not in the variable.",
            envvar=KEY_VARIABLE,
            show_default="none",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="Further accepted API keys, one a line; prefixes are never shared across keys.", show_default="none"
        ),
    ] = None,
    cpu_mode: TalkingModeOption = None,
    htp: HtpOption = None,
    reproducible: ReproducibleOption = False,
    speculate: SpeculateOption = None,
    draft_corpus: DraftCorpusOption = None,
    draft: DraftOption = None,
    draft_tokens: DraftTokensOption = None,
    draft_tree: DraftTreeOption = False,
    batch: Annotated[
        bool, typer.Option("--batch", help="Advance several answers in one pass of a verify graph; not on the CPU.")
    ] = False,
    cors: Annotated[
        list[str] | None,
        typer.Option(help="Web origin whose pages may call the API; repeatable.", show_default="none"),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print the address and errors: no summary, no line for each request.")
    ] = False,
) -> None:
    """Serve a bundle with OpenAI's API.

    Requests take turns token by token. Each continues the cache that has most of its prompt. The address goes to
    standard output once the server answers; a summary and a line for each request go to standard error. Ctrl-C stops
    it.
    """
    if missing := [each for each in _NEEDED if find_spec(each) is None]:
        wanted, fix = "starlette and uvicorn", 'Run pip install "edgekv[serve]".'
        raise UsageError("packages", got=f"no {' and no '.join(missing)}", expected=wanted, fix=fix)
    from edgekv.engine import Adaptive, parse_budget
    from edgekv.full_context import check_on_full
    from edgekv.loading import load
    from edgekv.prefix import StoreConfig
    from edgekv.serve import Limits, ServeOptions, Serving
    from edgekv.serve.serving import StuckEngineError

    options = ServeOptions(
        host,
        port,
        name,
        accepted_keys(api_key, api_key_file),
        tuple(cors or ()),
        Limits(sessions=max_sessions, queue=max_queue, request_s=timeout),
        logs_requests=not quiet,
        on_full=check_on_full(on_full, "--on-full"),
    )
    if not (options.is_local or options.keys):
        warning = f"anyone who reaches this address may use the model. Set {KEY_VARIABLE}, or give --api-key-file."
        typer.echo(f"edgekv: warning: --host {host} without API keys: {warning}", err=True)
    mode = Adaptive(parse_budget(cache_budget))
    speculation = SpeculateOptions(speculate, draft_corpus, draft, draft_tokens, draft_tree)
    common: dict[str, Any] = {
        "engine": engine,
        "threads": threads,
        "cpu_mode": talking_mode(engine, cpu_mode),
        "htp": htp,
    }
    store = StoreConfig(disk_folder=prefix_cache)
    with (
        load(bundle, cache_mode=mode, prefix_cache=store, reproducible=reproducible, **common) as model,
        speculation.opened(model, **common) as drafts,
    ):
        serving = Serving(model, replace(options, speculate=drafts, batches=batch))
        typer.echo(f"{serving.url}/v1 serves {serving.service.name} on {engine_and_mode(model.engine)}")
        if not quiet:
            typer.echo("\n".join(summary(serving, options, cache_budget, prefix_cache)), err=True)
        try:
            serving.run()
        except StuckEngineError as error:
            typer.echo(f"edgekv: error: {error}", err=True)
            os._exit(error.exit_code)  # closing the model would wait for the step


def summary(serving: Serving, options: ServeOptions, cache_budget: str, prefix_cache: Path | None) -> Iterator[str]:
    """What is served, and how."""
    service, limits = serving.service, options.limits
    if service.has_chat:
        yield f"chat page  {serving.page_url}"
    else:
        yield "chat       no: the bundle has no chat template; /v1/completions continues texts"
    yield f"context    {service.context:,} tokens for a prompt and its answer"
    budget = f"{cache_budget} of the free memory" if cache_budget.endswith("%") else cache_budget
    yield f"sessions   {limits.sessions}, caches within {budget}; {limits.queue} more requests may wait"
    yield f"prefixes   {'in memory' if prefix_cache is None else f'in memory and in {prefix_cache}'}"
    if service.model.is_reproducible:
        yield "answers    the same for the same request"
    if adapters := service.model_names[1:]:
        yield f"adapters   {', '.join(adapters)}"
    yield f"API keys   {len(options.keys) or 'none: every request is accepted'}"
