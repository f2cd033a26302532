"""`edgekv chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from edgekv.cli.engine_options import HtpOption, LoraOption, TalkingModeOption, joined, talking_mode
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
from edgekv.cli.summary import engine_and_mode, speculation_summary
from edgekv.errors import ContextFullError, EdgeKVError

if TYPE_CHECKING:
    from edgekv.conversation import Answer, Conversation
    from edgekv.session import GenerationStats, StopReason

_CUT: dict[StopReason | None, str] = {
    "length": "; cut: --max-new-tokens allows more",
    "context": "; cut: the context is full",
}
HELP = "/reset forgets the conversation, /save FILE and /load FILE keep it, /help, /quit; Ctrl-C stops an answer."


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
    speculate: SpeculateOption = None,
    draft_corpus: DraftCorpusOption = None,
    draft: DraftOption = None,
    draft_tokens: DraftTokensOption = None,
    draft_tree: DraftTreeOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; needs --message.")] = False,
) -> None:
    """Talk to a model.

    The conversation stays in the KV cache, so each turn computes only its new tokens. Answers go to standard output,
    statistics to standard error.
    """
    from edgekv.conversation import Conversation
    from edgekv.loading import load  # imports the runtime, which --help does not need
    from edgekv.session.call import choose_params
    from edgekv.session.params import SamplingParams

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
    speculation = SpeculateOptions(speculate, draft_corpus, draft, draft_tokens, draft_tree)
    options: dict[str, Any] = {
        "engine": engine,
        "threads": threads,
        "cpu_mode": talking_mode(engine, cpu_mode),
        "htp": htp,
    }
    with load(bundle, **options) as model, speculation.opened(model, **options) as wanted:
        record = model.bundle.manifest.generation
        if max_new_tokens is None and (record is None or record.max_new_tokens is None):
            keywords["max_new_tokens"] = model.bundle.manifest.context
        params = choose_params(None, keywords, model.defaults).params
        assert isinstance(params, SamplingParams)
        conversation = Conversation(model, system=system, params=params, speculate=wanted, lora=joined(lora))
        if message is None:
            _converse(conversation)
            return
        with _full_context("Shorten the message, or export with a larger --context."):
            answer = conversation.say(message)
            if as_json:
                tokens = list(answer)
                print_json(Turn(message, answer.text, [token.id for token in tokens], answer.stats))
            else:
                _print(answer)


def _converse(conversation: Conversation) -> None:
    """Read lines and answer them until the input ends."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        typer.echo(HELP, err=True)
    while True:
        if is_terminal:
            typer.echo("> ", nl=False, err=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            typer.echo(err=True)
            continue
        if not line:
            return
        if not (line := line.strip()):
            continue
        if line == "/quit":
            return
        try:
            if line.startswith("/"):
                _command(conversation, line)
            else:
                with _full_context("Forget the conversation with /reset, or export with a larger --context."):
                    _print(conversation.say(line))
        except EdgeKVError as error:
            typer.echo(f"edgekv: error: {error}", err=True)


@contextmanager
def _full_context(fix: str) -> Iterator[None]:
    """Say what a user of this command can do about a full context: it has no option for the policy."""
    try:
        yield
    except ContextFullError as error:
        raise ContextFullError(error.field, got=error.got, expected=error.expected, fix=fix) from None


def _command(conversation: Conversation, line: str) -> None:
    name, _, argument = line.partition(" ")
    if name == "/reset":
        conversation.reset()
    elif name == "/save" and argument:
        conversation.save(Path(argument))
    elif name == "/load" and argument:
        conversation.load(Path(argument))
    else:
        typer.echo(HELP, err=True)


def _print(answer: Answer) -> None:
    """Stream an answer. Ctrl-C ends the answer, not the conversation."""
    try:
        with answer:
            for token in answer:
                typer.echo(token.text, nl=False)
    except KeyboardInterrupt:
        pass
    typer.echo()
    typer.echo(_figures(answer.stats), err=True)


def _figures(stats: GenerationStats) -> str:
    first = "" if stats.time_to_first_token_ms is None else f", first token {stats.time_to_first_token_ms:.0f} ms"
    speed = "" if stats.tokens_per_second is None else f", {stats.tokens_per_second:.1f} tokens/s"
    cached = f"{stats.reused_tokens} of {stats.prompt_tokens} prompt tokens were in the cache"
    tokens = f"{engine_and_mode(stats.engine)}: {stats.generated_tokens} tokens"
    return f"[{tokens}{first}{speed}; {cached}{speculation_summary(stats)}{_CUT.get(stats.stop_reason, '')}]"
