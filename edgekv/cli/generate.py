"""`edgekv generate`: continue a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from edgekv.cli.command import NOTHING, OptionValues, command
from edgekv.cli.constraint import ConstraintOptions
from edgekv.cli.drafts import opened_drafts
from edgekv.cli.generated import print_sequences, print_stream
from edgekv.cli.model import BundleArgument, LoraOption, interactive, joined
from edgekv.cli.output import Output
from edgekv.cli.pictures import ImageOption, encoder_line, opened_pictures, waiting_tiles
from edgekv.cli.prefix_cache import SaltOption, salt_of, store_config
from edgekv.cli.prompt import PromptOptions
from edgekv.cli.waiting import waiting
from edgekv.draft.speculation import Speculation
from edgekv.errors import UsageError
from edgekv.option import Option, OptionGroup
from edgekv.prefix import RetentionPolicy, StoreConfig
from edgekv.runtime.load_options import CacheOptions, EngineOptions
from edgekv.text.params import BeamParams, SamplingParams, choose_params

SEQUENCE = 0  # the id under which `--session` runs


@command
def generate(
    bundle: BundleArgument,
    prompt: PromptOptions,
    sampling: OptionValues[SamplingParams],
    constraint: ConstraintOptions,
    cache: CacheOptions,
    prefixes: Annotated[OptionValues[StoreConfig], OptionGroup("Prefix cache")],
    retention: Annotated[OptionValues[RetentionPolicy], OptionGroup("Prefix cache")],
    engine: EngineOptions,
    output: Output,
    beams: Annotated[OptionValues[BeamParams], OptionGroup("Beam search")] = NOTHING,
    drafts: Annotated[Speculation | None, OptionGroup("Drafts")] = None,
    cache_salt: SaltOption = None,
    lora: LoraOption = (),
    image: ImageOption = (),
    session: Annotated[
        Path | None,
        Option(
            "Restore the sequence in this file before prefill, and save it there afterwards. The prompt is still the "
            "whole text; what it shares with the saved text is not run again."
        ),
    ] = None,
) -> None:
    """The text is streamed to standard output, a line of statistics goes to standard error. Defaults come from the
    checkpoint's generation_config.json; a second line lists them. Ctrl-C ends the text and stores the computed tokens
    in the prefix cache.
    """
    text = prompt.read()
    if lora and session is not None:
        raise UsageError("--session", got="it with --lora", expected="one of them", fix="Leave one of them out.")
    keywords: dict[str, Any] = {**sampling, **beams, "grammar": constraint.read()}
    from edgekv.engine.saved import load_sequence, save_sequence
    from edgekv.loading import open_model  # imports the runtime, which --help does not need

    choose_params(None, keywords, SamplingParams(temperature=1.0))  # reject invalid options before a bundle is read
    config = store_config(prefixes)
    policy = RetentionPolicy(**retention) if retention else None
    chosen = interactive(engine)
    with waiting(output):
        opened = open_model(bundle, chosen, cache, config)
    with opened as model, opened_drafts(drafts, model, chosen) as speculate:
        if session is not None:
            load_sequence(model.engine, SEQUENCE, session)
            keywords["sequence"] = SEQUENCE
        shared: dict[str, Any] = {"cache_salt": salt_of(cache_salt, model), "retention": policy, "lora": joined(lora)}
        shared["pictures"] = pictures = opened_pictures(image, model, output)
        with waiting(output):
            result: Any = model.generate(text, speculate=speculate, **shared, **keywords)
        if beams:
            print_sequences(result, output)
            return
        record = model.bundle.manifest.generation
        try:
            tiles = waiting_tiles(pictures)
            ignored = [] if record is None else record.ignored
            print_stream(result, output, ignored, lambda: model.expert_stats)
            if image:
                output.note(encoder_line(pictures, tiles))
        finally:  # after Ctrl-C too
            if session is not None:
                save_sequence(model.engine, SEQUENCE, session)
