"""`edgekv chat`: a conversation in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from edgekv.cli.dialog import Dialog
from edgekv.cli.engine_options import (
    HtpOption,
    LoraOption,
    OnFullOption,
    ReproducibleOption,
    TalkingModeOption,
    joined,
    talking_mode,
)
from edgekv.cli.grammar_options import GrammarOption, JsonSchemaOption, RegexOption, parse_grammar
from edgekv.cli.output import print_json
from edgekv.cli.speculate_options import (
    DraftCorpusOption,
    DraftOption,
    DraftTokensOption,
    DraftTreeOption,
    SpeculateOption,
    SpeculateOptions,
)

if TYPE_CHECKING:
    from edgekv.engine import GenerationStats


class Turn(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    message: str
    answer: str
    tokens: list[int]
    stats: GenerationStats


def chat(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.", show_default=False)],
    message: Annotated[
        str | None, typer.Option(help="Send one message, print the answer and exit.", show_default="a conversation")
    ] = None,
    lora: LoraOption = None,
    system: Annotated[str | None, typer.Option(help="System prompt.", show_default="the model's own")] = None,
    engine: Annotated[str, typer.Option(help="Where the graphs run: cpu or htp; litert or tflite.")] = "cpu",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Maximum number of tokens of an answer.", show_default="the bundle's, or the context"),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default="the bundle's, or 0")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens that reach p together.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.", show_default="drawn")] = None,
    json_schema: JsonSchemaOption = None,
    grammar: GrammarOption = None,
    regex: RegexOption = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of an engine on the CPU.", show_default="all cores")
    ] = None,
    cpu_mode: TalkingModeOption = None,
    htp: HtpOption = None,
    reproducible: ReproducibleOption = False,
    speculate: SpeculateOption = None,
    draft_corpus: DraftCorpusOption = None,
    draft: DraftOption = None,
    draft_tokens: DraftTokensOption = None,
    draft_tree: DraftTreeOption = False,
    on_full: OnFullOption = "drop-oldest",
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Keep what is typed at a terminal for later chats.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; needs --message.")] = False,
) -> None:
    """Talk to a model.

    The conversation stays in the KV cache, so each turn computes only its new tokens. Answers go to standard output,
    all else to standard error. /help lists the commands of a conversation.
    """
    from edgekv.conversation import Conversation, answer_defaults
    from edgekv.engine.call import choose_params
    from edgekv.full_context import check_on_full
    from edgekv.loading import load  # imports the runtime, which --help does not need
    from edgekv.text.params import SamplingParams

    if as_json and message is None:
        raise typer.BadParameter("--json needs --message")
    keywords: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "grammar": parse_grammar(json_schema, grammar, regex),
    }
    choose_params(None, keywords, SamplingParams(temperature=1.0))  # reject invalid options before a bundle is read
    full = check_on_full(on_full, "--on-full")
    speculation = SpeculateOptions(speculate, draft_corpus, draft, draft_tokens, draft_tree)
    options: dict[str, Any] = {
        "engine": engine,
        "threads": threads,
        "cpu_mode": talking_mode(engine, cpu_mode),
        "htp": htp,
    }
    with load(bundle, reproducible=reproducible, **options) as model, speculation.opened(model, **options) as wanted:
        params = choose_params(None, keywords, answer_defaults(model)).params
        assert isinstance(params, SamplingParams)
        talk: dict[str, Any] = {"on_full": full, "speculate": wanted, "lora": joined(lora)}
        conversation = Conversation(model, system=system, params=params, **talk)
        dialog = Dialog(conversation, keeps_history=history)
        if message is None:
            dialog.run()
        elif as_json:
            answer = dialog.ask(message)
            tokens = list(answer)
            print_json(Turn(message, answer.text, [token.id for token in tokens], answer.stats))
        else:
            dialog.say(message)
