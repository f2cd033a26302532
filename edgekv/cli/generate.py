"""`edgekv generate`: continue a prompt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgekv.cli.engine_options import (
    HtpOption,
    LoraOption,
    ReproducibleOption,
    TalkingModeOption,
    joined,
    talking_mode,
)
from edgekv.cli.generated import print_sequences, print_stream
from edgekv.cli.grammar_options import GrammarOption, JsonSchemaOption, RegexOption, parse_grammar
from edgekv.cli.numbers import parse_bias
from edgekv.cli.prefix_options import (
    SALT_VARIABLE,
    BlockReuseOption,
    CacheSaltOption,
    DecodeDurationOption,
    DecodePriorityOption,
    DiskSizeOption,
    HostSizeOption,
    MaxTokensOption,
    MemoryFractionOption,
    PartialReuseOption,
    PrefixCacheOption,
    PrefixOptions,
    RetentionOption,
    TokensPerBlockOption,
    parse_retention,
)
from edgekv.cli.prompt import PromptFileOption, PromptOption, read_prompt
from edgekv.cli.speculate_options import (
    DraftCorpusOption,
    DraftOption,
    DraftTokensOption,
    DraftTreeOption,
    SpeculateOption,
    SpeculateOptions,
)
from edgekv.errors import UsageError

if TYPE_CHECKING:
    from edgekv.text import EarlyStopping


SEQUENCE = 0  # the id under which `--session` runs


def generate(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.", show_default=False)],
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    lora: LoraOption = None,
    engine: Annotated[
        str, typer.Option(help="Where the graphs run: cpu or htp; for TFLite graphs litert or tflite.")
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
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens to generate.", show_default="the bundle's, or 128")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default="the bundle's, or 0")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.", show_default=False)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens that reach p together.", show_default=False)
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens less likely than this times the most likely one.", show_default=False),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Above 1 makes tokens of the prompt and the text less likely.", show_default=False),
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Subtracted from logits of generated tokens.", show_default=False)
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option(help="Subtracted once per occurrence of a generated token.", show_default=False),
    ] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID:BIAS, added to a token's logit; repeatable.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.", show_default="drawn")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; repeatable.", show_default=False)
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not end at an end-of-sequence token.")] = False,
    json_schema: JsonSchemaOption = None,
    grammar: GrammarOption = None,
    regex: RegexOption = None,
    num_beams: Annotated[
        int | None,
        typer.Option(help="Beam search with this many beams; the text is printed at its end.", show_default=False),
    ] = None,
    num_return_sequences: Annotated[
        int | None, typer.Option(help="Number of texts to print, best first.", show_default="1")
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help="A text's score is divided by its length to this power; above 0 favours longer ones.",
            show_default="1.0",
        ),
    ] = None,
    early_stopping: Annotated[
        str | None,
        typer.Option(
            help="true: end with num-beams texts. false: when a better one is unlikely. never: when none can be.",
            show_default="false",
        ),
    ] = None,
    on_full: Annotated[
        str,
        typer.Option(
            help="When the context is full: fail ends the text; sliding-window drops the oldest tokens; "
            "sinks(N, WINDOW) keeps the first N and the newest WINDOW; keydiff(BUDGET) or keydiff(BUDGET, RECENT) "
            "keeps the BUDGET tokens whose keys are least similar to the mean key, the RECENT newest (an eighth) among "
            "them."
        ),
    ] = "fail",
    cache_mode: Annotated[
        str,
        typer.Option(
            help="What is kept from step to step: always, long-sequence-only(TOKENS), adaptive or disabled, which "
            "computes the whole sequence again for every token."
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
    free_memory_fraction: MemoryFractionOption = None,
    host_cache_size: HostSizeOption = None,
    disk_cache_size: DiskSizeOption = None,
    speculate: SpeculateOption = None,
    draft_corpus: DraftCorpusOption = None,
    draft: DraftOption = None,
    draft_tokens: DraftTokensOption = None,
    draft_tree: DraftTreeOption = False,
    session: Annotated[
        Path | None,
        typer.Option(
            help="Restore the sequence in this file before prefill, and save it there afterwards. The prompt is still "
            "the whole text; what it shares with the saved text is not run again.",
            show_default=False,
        ),
    ] = None,
    kv_growth: Annotated[
        str | None,
        typer.Option(
            help="Let cache memory grow from context to context, with slot or pointer-shift: staggered, one layer "
            "after the other, or together.",
            show_default="all memory at once",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of an engine on the CPU.", show_default="all cores")
    ] = None,
    cpu_mode: TalkingModeOption = None,
    htp: HtpOption = None,
    reproducible: ReproducibleOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
) -> None:
    """Continue a prompt.

    The text is streamed to standard output, a line of statistics goes to standard error. Defaults come from the
    checkpoint's generation_config.json; a second line lists them. Ctrl-C ends the text and stores the computed tokens
    in the prefix cache.
    """
    text = read_prompt(prompt, prompt_file)
    if lora and session is not None:
        raise UsageError("--session", got="it with --lora", expected="one of them", fix="Leave one of them out.")
    keywords: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": parse_bias(logit_bias) if logit_bias else None,
        "seed": seed,
        "stop": stop or None,
        "ignore_eos": ignore_eos or None,
        "grammar": parse_grammar(json_schema, grammar, regex),
        "num_beams": num_beams,
        "num_return_sequences": num_return_sequences,
        "length_penalty": length_penalty,
        "early_stopping": None if early_stopping is None else _early_stopping(early_stopping),
    }
    from edgekv.engine.call import choose_params
    from edgekv.engine.saved import load_sequence, save_sequence
    from edgekv.loading import load  # imports the runtime, which --help does not need
    from edgekv.text.params import SamplingParams

    choose_params(None, keywords, SamplingParams(temperature=1.0))  # reject invalid options before a bundle is read
    speculation = SpeculateOptions(speculate, draft_corpus, draft, draft_tokens, draft_tree)
    options = PrefixOptions(
        prefix_cache,
        tokens_per_block,
        max_tokens,
        free_memory_fraction,
        host_cache_size,
        disk_cache_size,
        enable_block_reuse,
        enable_partial_reuse,
    )
    mode = talking_mode(engine, cpu_mode)
    policy = parse_retention(retention or (), decode_retention_priority, decode_duration_ms)
    with load(
        bundle,
        engine,
        kv_update=kv_update,
        reserve=reserve,
        policy=on_full,
        threads=threads,
        cpu_mode=mode,
        htp=htp,
        cache_mode=cache_mode,
        prefix_cache=options.config(),
        kv_growth=kv_growth,
        reproducible=reproducible,
    ) as model:
        if cache_salt is None and model.prefix_store is not None:
            cache_salt = os.environ.get(SALT_VARIABLE) or None
        if session is not None:
            load_sequence(model, SEQUENCE, session)
            keywords["sequence"] = SEQUENCE
        with speculation.opened(model, engine=engine, threads=threads, cpu_mode=mode, htp=htp) as wanted:
            shared: dict[str, Any] = {"cache_salt": cache_salt, "retention": policy, "lora": joined(lora)}
            result: Any = model.generate(text, speculate=wanted, **shared, **keywords)
            if num_beams is not None:
                print_sequences(result, as_json)
                return
            record = model.bundle.manifest.generation
            try:
                print_stream(result, as_json, [] if record is None else record.ignored)
            finally:  # after Ctrl-C too
                if session is not None:
                    save_sequence(model, SEQUENCE, session)


def _early_stopping(text: str) -> EarlyStopping:
    meanings: dict[str, EarlyStopping] = {"true": True, "false": False, "never": "never"}
    if text not in meanings:
        wanted = "true, false or never"
        raise UsageError("--early-stopping", got=repr(text), expected=wanted, fix="Leave it out for false.")
    return meanings[text]
