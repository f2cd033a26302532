"""`edgekv generate`: continue a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from edgekv.errors import UsageError

if TYPE_CHECKING:
    from edgekv.generate import GenerationStats


class Output(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    prompt_tokens: list[int]
    tokens: list[int]
    text: str
    stats: GenerationStats


def generate(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.", show_default=False)],
    prompt: Annotated[str | None, typer.Option(help="The text to continue.", show_default=False)] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file with the text; - for standard input.", show_default=False)
    ] = None,
    engine: Annotated[str, typer.Option(help="Where the graphs run: cpu or htp.")] = "cpu",
    kv_update: Annotated[
        str | None,
        typer.Option(
            help="How the cache takes new rows: pointer-shift or slot.",
            show_default="slot; pointer-shift if a reserve is given",
        ),
    ] = None,
    reserve: Annotated[
        str | None, typer.Option(help="Memory of pointer-shift: 2.0, 1.5 or between 1 and 2.", show_default="2.0")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Generate at most so many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token, always.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely tokens.", show_default=False)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Only the most likely tokens that reach p together.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random numbers.", show_default="drawn")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text before which to end; may be repeated.", show_default=False)
    ] = None,
    on_full: Annotated[
        str, typer.Option(help="What to do when the context is full: fail, which ends, or sliding-window.")
    ] = "fail",
    cache_mode: Annotated[
        str,
        typer.Option(
            help="What is kept from step to step: always, long-sequence-only(TOKENS), adaptive or disabled, which "
            "computes the whole sequence anew for every token."
        ),
    ] = "always",
    threads: Annotated[int | None, typer.Option(help="Threads of the engine cpu.", show_default="all cores")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
) -> None:
    """Continue a prompt.

    The text goes to standard output as it comes, a line of figures to standard error.
    """
    text = _prompt(prompt, prompt_file)
    from edgekv.model import load  # the runtime, which the help needs not wait for

    model = load(
        bundle, engine, kv_update=kv_update, reserve=reserve, policy=on_full, threads=threads, cache_mode=cache_mode
    )
    generation = model.generate(
        text, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop or ()
    )
    if as_json:
        tokens = list(generation)
        output = Output(
            prompt_tokens=list(generation.prompt),
            tokens=[token.id for token in tokens],
            text="".join(token.text for token in tokens),
            stats=generation.stats,
        )
        typer.echo(msgspec.json.encode(output))
        return
    for token in generation:
        typer.echo(token.text, nl=False)
    typer.echo()
    typer.echo(summary(generation.stats), err=True)


def summary(stats: GenerationStats) -> str:
    """The figures of a generation in one line."""
    decode = "" if stats.decode_ms_per_token is None else f", {stats.decode_ms_per_token:.1f} ms/token"
    reserve = "" if stats.reserve is None else f" {stats.reserve:g}"
    mode = "" if stats.cache_mode == "always" else f", {stats.cache_mode}, {stats.computed_tokens} tokens computed"
    seed = "" if stats.seed is None else f", seed {stats.seed}"
    return (
        f"[{stats.engine}: {stats.prompt_tokens} + {stats.generated_tokens} tokens, ended by {stats.stop_reason}; "
        f"prefill {stats.prefill_ms:.0f} ms{decode}, host {stats.host_us_per_step:.0f} us/step; "
        f"KV {stats.kv_update}{reserve}{mode}: {stats.kv_bytes_held:,} bytes held, "
        f"{stats.kv_bytes_copied:,} copied{seed}]"
    )


def _prompt(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        found = "neither" if text is None else "both"
        raise UsageError("--prompt, --prompt-file", found=found, wanted="one of them", way_out="Give one.")
    if file is None:
        return text or ""
    try:
        raw = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "--prompt-file", found=f"{file}: {error}", wanted="a UTF-8 text file", way_out="Check the path."
        ) from None
