"""`edgekv chat`: a conversation in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from edgekv.cli.command import OptionValues, command
from edgekv.cli.constraint import ConstraintOptions
from edgekv.cli.dialog import Dialog
from edgekv.cli.drafts import opened_drafts
from edgekv.cli.model import CONVERSATION_CACHE, BundleArgument, LoraOption, interactive, joined
from edgekv.cli.output import Output, print_json
from edgekv.cli.pictures import ImageOption, opened_pictures
from edgekv.cli.waiting import waiting
from edgekv.draft.speculation import Speculation
from edgekv.errors import UsageError
from edgekv.option import Option, OptionGroup
from edgekv.runtime.load_options import CacheOptions, EngineOptions, OnFullOption
from edgekv.text.params import SamplingParams, choose_params

if TYPE_CHECKING:
    from edgekv.engine import GenerationStats


class Turn(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    message: str
    answer: str
    thoughts: str
    tokens: list[int]
    stats: GenerationStats


@command
def chat(
    bundle: BundleArgument,
    sampling: OptionValues[SamplingParams],
    constraint: ConstraintOptions,
    cache: Annotated[CacheOptions, OptionGroup("Cache", only=CONVERSATION_CACHE)],
    engine: EngineOptions,
    output: Output,
    drafts: Annotated[Speculation | None, OptionGroup("Drafts")] = None,
    message: Annotated[
        str | None, Option("Send one message, print the answer and exit.", shown="a conversation")
    ] = None,
    system: Annotated[str | None, Option("System prompt.", shown="the model's own")] = None,
    lora: LoraOption = (),
    image: ImageOption = (),
    on_full: OnFullOption = "drop-oldest",
    history: Annotated[
        bool, Option("Keep what is typed at a terminal for later chats.", "--history/--no-history")
    ] = True,
) -> None:
    """The conversation stays in the KV cache, so each turn computes only its new tokens. Answers go to standard output,
    all else, such as reasoning before them, to standard error. /help lists the commands of a chat.
    """
    if output.as_json and message is None:
        raise UsageError("--json", got="it without --message", expected="both", fix="Add --message TEXT.")
    from edgekv.conversation import Conversation, answer_defaults
    from edgekv.loading import open_model  # imports the runtime, which --help does not need

    keywords: dict[str, Any] = {**sampling, "grammar": constraint.read()}
    choose_params(None, keywords, SamplingParams(temperature=1.0))  # reject invalid options before a bundle is read
    chosen = interactive(engine)
    with waiting(output):
        opened = open_model(bundle, chosen, cache)
    with opened as model, opened_drafts(drafts, model, chosen) as speculate:
        params, _ = choose_params(None, keywords, answer_defaults(model))
        assert isinstance(params, SamplingParams)
        talk: dict[str, Any] = {"on_full": on_full, "speculate": speculate, "lora": joined(lora)}
        conversation = Conversation(model, system=system, params=params, **talk)
        pictures = opened_pictures(image, model, output)
        dialog = Dialog(conversation, model, output, pictures, keeps_history=history)
        if message is None:
            dialog.run()
        elif output.as_json:
            answer = dialog.ask(message)
            tokens = list(answer)
            print_json(Turn(message, answer.text, answer.thoughts, [token.id for token in tokens], answer.stats))
        else:
            dialog.say(message)
