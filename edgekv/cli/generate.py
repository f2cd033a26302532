"""`edgekv generate`: continue a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from edgekv.cli.prefix_options import (
    BlockReuseOption,
    CacheSaltOption,
    DecodeDurationOption,
    DecodePriorityOption,
    DiskSizeOption,
    HostSizeOption,
    MaxTokensOption,
    PartialReuseOption,
    PrefixCacheOption,
    PrefixOptions,
    RetentionOption,
    TokensPerBlockOption,
    parse_retention,
)
from edgekv.errors import UsageError

if TYPE_CHECKING:
    from edgekv.session import Generation, GenerationStats
    from edgekv.session.beam import EarlyStopping
    from edgekv.session.beam_run import BeamResult, BeamSequence, BeamStats


class Output(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    prompt_tokens: list[int]
    tokens: list[int]
    text: str
    stats: GenerationStats


class BeamOutput(msgspec.Struct, frozen=True):
    """What `--json` prints with `--num-beams`."""

    prompt_tokens: list[int]
    sequences: list[BeamSequence]
    stats: BeamStats


def generate(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.", show_default=False)],
    prompt: Annotated[str | None, typer.Option(help="The text to continue.", show_default=False)] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file with the text; - for standard input.", show_default=False)
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Where the graphs run: cpu or htp; of TFLite graphs litert or tflite.")
    ] = "cpu",
    kv_update: Annotated[
        str | None,
        typer.Option(
            help="How the cache takes new rows: pointer-shift, slot, mirror or shift-concat.",
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
    num_beams: Annotated[
        int | None,
        typer.Option(
            help="Search the likeliest text with so many beams; it is printed at its end.", show_default=False
        ),
    ] = None,
    num_return_sequences: Annotated[
        int | None, typer.Option(help="Print so many of the texts found, best first.", show_default="1")
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help="Power of the length by which a text's score is divided; above 0 favours longer ones.",
            show_default="1.0",
        ),
    ] = None,
    early_stopping: Annotated[
        str | None,
        typer.Option(
            help="true: end with num-beams texts. false: when none is likely to be better. never: when none can be.",
            show_default="false",
        ),
    ] = None,
    on_full: Annotated[
        str,
        typer.Option(
            help="What to do when the context is full: fail, which ends; sliding-window, which forgets the oldest "
            "tokens; sinks(N, WINDOW), which keeps the first N and the newest WINDOW; keydiff(BUDGET) or "
            "keydiff(BUDGET, RECENT), which keeps the BUDGET tokens whose keys are least like the mean key, the RECENT "
            "newest (an eighth) among them."
        ),
    ] = "fail",
    cache_mode: Annotated[
        str,
        typer.Option(
            help="What is kept from step to step: always, long-sequence-only(TOKENS), adaptive or disabled, which "
            "computes the whole sequence anew for every token."
        ),
    ] = "always",
    prefix_cache: PrefixCacheOption = None,
    cache_salt: CacheSaltOption = None,
    retention: RetentionOption = None,
    decode_retention_priority: DecodePriorityOption = None,
    decode_duration_ms: DecodeDurationOption = None,
    enable_block_reuse: BlockReuseOption = True,
    enable_partial_reuse: PartialReuseOption = True,
    tokens_per_block: TokensPerBlockOption = None,
    max_tokens: MaxTokensOption = None,
    host_cache_size: HostSizeOption = None,
    disk_cache_size: DiskSizeOption = None,
    kv_growth: Annotated[
        str | None,
        typer.Option(
            help="Let the cache grow from context to context, with slot or pointer-shift: staggered, one layer after "
            "the other, or together.",
            show_default="all memory at once",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of an engine on the CPU.", show_default="all cores")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
) -> None:
    """Continue a prompt.

    The text goes to standard output as it comes, a line of figures to standard error.
    """
    text = _prompt(prompt, prompt_file)
    early = None if early_stopping is None else _early_stopping(early_stopping)
    from edgekv.model import load  # the runtime, which the help needs not wait for
    from edgekv.session.beam import refuse_beam_options, refuse_sampling

    if num_beams is None:
        refuse_beam_options(num_return_sequences, length_penalty, early)
    else:
        refuse_sampling(temperature, top_k, top_p, seed, stop or ())
    options = PrefixOptions(
        prefix_cache,
        tokens_per_block,
        max_tokens,
        host_cache_size,
        disk_cache_size,
        enable_block_reuse,
        enable_partial_reuse,
    )
    policy = parse_retention(retention or (), decode_retention_priority, decode_duration_ms)
    model = load(
        bundle,
        engine,
        kv_update=kv_update,
        reserve=reserve,
        policy=on_full,
        threads=threads,
        cache_mode=cache_mode,
        prefix_cache=options.config(),
        kv_growth=kv_growth,
    )
    if num_beams is None:
        generation = model.generate(
            text,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop or (),
            cache_salt=cache_salt,
            retention=policy,
        )
        _print_stream(generation, as_json)
    else:
        result = model.generate(
            text,
            max_new_tokens,
            num_beams=num_beams,
            num_return_sequences=num_return_sequences,
            length_penalty=length_penalty,
            early_stopping=early,
            cache_salt=cache_salt,
            retention=policy,
        )
        _print_sequences(result, as_json)


def _print_stream(generation: Generation, as_json: bool) -> None:
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


def _print_sequences(result: BeamResult, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(BeamOutput(list(result.prompt), list(result.sequences), result.stats)))
        return
    for sequence in result.sequences:
        typer.echo(sequence.text)
        typer.echo(
            f"[score {sequence.score:.4f}: {len(sequence.tokens)} tokens, ended by {sequence.stop_reason}]", err=True
        )
    typer.echo(beam_summary(result.stats), err=True)


def summary(stats: GenerationStats) -> str:
    """The figures of a generation in one line."""
    decode = "" if stats.decode_ms_per_token is None else f", {stats.decode_ms_per_token:.1f} ms/token"
    reserve = "" if stats.reserve is None else f" {stats.reserve:g}"
    restored = f" ({stats.restored_tokens} restored)" if stats.restored_tokens else ""
    mode = "" if stats.cache_mode == "always" else f", {stats.cache_mode}, {stats.computed_tokens} tokens computed"
    growth = "" if stats.kv_growth is None else f" ({stats.kv_bytes_peak:,} at most)"
    seed = "" if stats.seed is None else f", seed {stats.seed}"
    return (
        f"[{stats.engine}: {stats.prompt_tokens}{restored} + {stats.generated_tokens} tokens, "
        f"ended by {stats.stop_reason}; "
        f"prefill {stats.prefill_ms:.0f} ms{decode}, host {stats.host_us_per_step:.0f} us/step; "
        f"KV {stats.kv_update}{reserve}{mode}: {stats.kv_bytes_held:,} bytes held{growth}, "
        f"{stats.kv_bytes_copied:,} copied{_eviction(stats)}{seed}]"
    )


def _eviction(stats: GenerationStats) -> str:
    evicted = f", {stats.evicted_tokens} tokens evicted" if stats.evicted_tokens else ""
    cost = stats.requantization
    if cost is None or not cost.keys:
        return evicted
    real = "" if cost.rms is None else f", {cost.rms:.2g} in real numbers"
    clipped = f", {cost.clipped} elements clipped" if cost.clipped else ""
    return f"{evicted}, moved keys off by {cost.rms_steps:.3f} steps rms{real}, {cost.max_steps:.2f} at most{clipped}"


def beam_summary(stats: BeamStats) -> str:
    """The figures of a beam search in one line."""
    decode = "" if stats.decode_ms_per_token is None else f", {stats.decode_ms_per_token:.1f} ms/token of all beams"
    reserve = "" if stats.reserve is None else f" {stats.reserve:g}"
    return (
        f"[{stats.engine}: {stats.prompt_tokens} tokens, then {stats.num_beams} beams of {stats.decoded_tokens}; "
        f"prefill {stats.prefill_ms:.0f} ms{decode}, host {stats.host_us_per_step:.0f} us/step; "
        f"KV {stats.kv_update}{reserve}: {stats.kv_bytes_held:,} bytes held, {stats.kv_bytes_beside:,} of them beside "
        f"the cache, {stats.kv_bytes_copied:,} copied, {stats.kv_bytes_gathered:,} of them gathered]"
    )


def _early_stopping(text: str) -> EarlyStopping:
    meanings: dict[str, EarlyStopping] = {"true": True, "false": False, "never": "never"}
    if text not in meanings:
        wanted = "true, false or never"
        raise UsageError("--early-stopping", got=repr(text), expected=wanted, fix="Leave it out for false.")
    return meanings[text]


def _prompt(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        found = "neither" if text is None else "both"
        raise UsageError("--prompt, --prompt-file", got=found, expected="one of them", fix="Give one.")
    if file is None:
        return text or ""
    try:
        raw = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "--prompt-file", got=f"{file}: {error}", expected="a UTF-8 text file", fix="Check the path."
        ) from None
