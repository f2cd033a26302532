"""`edgekv serve`."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import click

from edgekv.cli.command import command
from edgekv.cli.drafts import opened_drafts
from edgekv.cli.model import CONVERSATION_CACHE, BundleArgument, interactive
from edgekv.cli.output import Output
from edgekv.cli.summary import engine_and_mode
from edgekv.cli.waiting import waiting
from edgekv.draft.speculation import Speculation
from edgekv.errors import UsageError
from edgekv.option import Option, OptionGroup
from edgekv.prefix import StoreConfig
from edgekv.runtime.load_options import CacheOptions, EngineOptions
from edgekv.serve.options import KEY_VARIABLE, ServeOptions, accepted_keys

if TYPE_CHECKING:
    from edgekv.serve import ModelServer

_CACHE = tuple(name for name in CONVERSATION_CACHE if name != "kv_growth")
"""The budget of all caches counts on caches that keep their size."""
_NEEDED = ("starlette", "uvicorn")
_SWITCH_S = 0.0002
"""How long the engine's thread may keep the interpreter from that of the connections; Python's 5 ms are tokens."""


@command
def serve(
    bundle: BundleArgument,
    options: Annotated[ServeOptions, OptionGroup("Server")],
    cache: Annotated[CacheOptions, OptionGroup("Cache", only=_CACHE)],
    prefixes: Annotated[StoreConfig, OptionGroup("Prefix cache")],
    engine: EngineOptions,
    output: Annotated[Output, OptionGroup("Output", only=("is_quiet",))],
    drafts: Annotated[Speculation | None, OptionGroup("Drafts")] = None,
    cache_budget: Annotated[
        str,
        Option("Memory of all caches: 64MiB, or 25% of the free memory.", group="Cache", subjects=("memory budget",)),
    ] = "50%",
    api_key: Annotated[
        str | None,
        Option(
            f"An accepted API key. Visible in the process list; prefer {KEY_VARIABLE}.",
            variable=KEY_VARIABLE,
            group="Server",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        Option("Further accepted API keys, one a line; prefixes are never shared across keys.", group="Server"),
    ] = None,
) -> None:
    """Requests take turns token by token. Each continues the cache that has most of its prompt. The address goes to
    standard output at once: requests wait there until the line "ready". A summary and a line for each request go to
    standard error. Ctrl-C stops it.
    """
    if missing := [package for package in _NEEDED if find_spec(package) is None]:
        expected, fix = "starlette and uvicorn", 'Run pip install "edgekv[serve]".'
        raise UsageError("packages", got=f"no {' and no '.join(missing)}", expected=expected, fix=fix)
    from edgekv.bundle import open_bundle
    from edgekv.engine import CacheMode, parse_budget
    from edgekv.loading import open_model
    from edgekv.serve import ModelServer
    from edgekv.serve.serving import StuckEngineError, address_of, open_socket

    options = replace(options, keys=accepted_keys(api_key, api_key_file), logs_requests=not output.is_quiet)
    if not (options.is_local or options.keys):
        warning = f"anyone who reaches this address may use the model. Set {KEY_VARIABLE}, or give --api-key-file."
        click.echo(f"edgekv: warning: --host {options.host} without API keys: {warning}", err=True)
    cache = replace(cache, cache_mode=CacheMode("adaptive", budget=parse_budget(cache_budget)))
    chosen = interactive(engine)
    name = options.name or open_bundle(bundle, verify=False).path.resolve().name
    engine_name = engine_and_mode("-".join(filter(None, (chosen.engine, chosen.cpu_mode))))
    with ExitStack() as stack:
        listener = stack.enter_context(open_socket(options))  # requests wait in it while graphs are loaded
        click.echo(f"{address_of(listener)}/v1 serves {name} on {engine_name}")
        started = monotonic()
        with waiting(output):
            model = stack.enter_context(open_model(bundle, chosen, cache, prefixes))
            speculate = stack.enter_context(opened_drafts(drafts, model, chosen))
            serving = ModelServer(model, replace(options, speculate=speculate), listener)
        if not output.is_quiet:
            click.echo("\n".join(summary(serving, options, cache_budget, prefixes.disk_folder)), err=True)
            click.echo(f"ready after {monotonic() - started:.1f} s", err=True)
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        gc.freeze()  # looking through all that has been loaded takes as long as tokens
        try:
            serving.run()
        except StuckEngineError as error:
            click.echo(f"edgekv: error: {error}", err=True)
            os._exit(error.exit_code)  # closing the model would wait for the step
        finally:
            gc.unfreeze()
            sys.setswitchinterval(interval_s)


def summary(serving: ModelServer, options: ServeOptions, cache_budget: str, prefix_cache: Path | None) -> Iterator[str]:
    """What is served, and how."""
    service, limits = serving.service, options.limits
    if (task := service.model.bundle.manifest.task) is not None:
        yield f"gives      {task.described(service.model.bundle.manifest.model.result_width)}"
    elif service.has_chat:
        yield f"chat page  {serving.page_url}"
    else:
        yield "chat       no: the bundle has no chat template; /v1/completions continues texts"
    what = "a text" if task is not None else "a prompt and its answer"
    yield f"context    {service.context_length:,} tokens for {what}"
    budget = f"{cache_budget} of the free memory" if cache_budget.endswith("%") else cache_budget
    yield f"sessions   {limits.sessions}, caches within {budget}; {limits.queue} more requests may wait"
    yield f"prefixes   {'in memory' if prefix_cache is None else f'in memory and in {prefix_cache}'}"
    if service.model.is_reproducible:
        yield "answers    the same for the same request"
    if adapters := service.model_names[1:]:
        yield f"adapters   {', '.join(adapters)}"
    yield f"API keys   {len(options.keys) or 'none: every request is accepted'}"
