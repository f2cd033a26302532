"""The calibration text: where it comes from, and its tokens in windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import UsageError
from edgekv.machine.decoding import DECODERS
from edgekv.machine.text_file import read_text_file
from edgekv.spec import CHECKPOINT_TOKENS, DecoderSpec
from edgekv.spec.chat import ChatTemplates
from edgekv.spec.text import begins_with
from exporters.checkpoint.checkpoint import Checkpoint

CALIBRATION = "calibration.txt"
"""The file of a calibration text, in a checkpoint's folder or beside this module."""

CHAT_SHARE = 5
"""One token in this many of a calibration text comes from a chat, if the checkpoint has a chat template."""

_CHATS = "calibration_chats.json"
_MESSAGES = 6  # of a conversation

Conversation = Sequence[Mapping[str, str]]
"""Messages with role and content."""


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A text.

    Attributes:
        name: in the manifest.
        text: prose and code.
        chats: conversations beside it; if there are none, paragraphs of the text stand for them.
    """

    name: str
    text: str
    chats: Sequence[Conversation] = ()


def read_calibration(path: Path | None, checkpoint: Path) -> CalibrationText:
    """The text of a file.

    Args:
        path: the file; None for the checkpoint's own text, or else the text that ships with edgekv.
        checkpoint: the checkpoint's folder; its own text is `calibration.txt`.

    Raises:
        UsageError: the file is not text.
    """
    own = checkpoint / CALIBRATION
    if path is None and own.is_file():
        return CalibrationText("the checkpoint's own", read_text_file(own, str(own)))
    if path is None:
        return CalibrationText("edgekv's own", default_calibration(), default_chats())
    return CalibrationText(path.name, read_text_file(path, "--calibration"))


def default_calibration() -> str:
    """The text that ships with edgekv: prose of many kinds, and Python code."""
    return resources.files("exporters.quantize").joinpath(CALIBRATION).read_text("utf-8")


def default_chats() -> list[Conversation]:
    """The conversations that ship with edgekv: questions and answers, lists, code, letters."""
    content = resources.files("exporters.quantize").joinpath(_CHATS).read_bytes()
    return DECODERS[list[Conversation]].decode(content)


def token_windows(
    checkpoint: Checkpoint,
    text: str,
    length: int,
    most: int | None = None,
    *,
    first: Sequence[int] | None = None,
    field: str = "--context",
) -> list[NDArray[np.int64]]:
    """The text as windows of `length` token ids without overlap, each starting alike. The last one may be shorter.

    Args:
        checkpoint: its tokenizer.
        text: the text.
        length: T of a window.
        most: the maximum number of windows.
        first: the tokens at the start of each window; None for the BOS token, if there is one.
        field: name of the length in errors.

    Raises:
        UsageError: the text has fewer than two tokens, or a window no room for one behind the first.
    """
    if first is None:
        first = [] if checkpoint.special.bos is None else [checkpoint.special.bos]
    return cut_windows(checkpoint.encode(text), length, first, field)[:most]


def cut_windows(
    ids: Sequence[int], length: int, first: Sequence[int], field: str = "--context"
) -> list[NDArray[np.int64]]:
    """Tokens as windows of `length` ids without overlap, each starting with `first`. The last one may be shorter.

    Where the tokens have `first` themselves, a window begins with those.

    Raises:
        UsageError: there are fewer than two tokens, or a window has no room for one behind `first`.
    """
    return [np.array([*first, *ids[part.start : part.stop]]) for part in cut_ranges(ids, length, first, field)]


def cut_ranges(ids: Sequence[int], length: int, first: Sequence[int], field: str = "--context") -> list[range]:
    """The places of the ids that follow `first` in each window of `cut_windows`.

    Raises:
        UsageError: as `cut_windows`.
    """
    least = max(1, len(first)) + 1
    if length < least:
        expected = f"at least {least}: the first {least - 1} of every text, and one more"
        raise UsageError(field, got=f"{length} tokens", expected=expected, fix=f"Use {least} or more.")
    ranges, at = list[range](), 0
    while at < len(ids):
        if begins_with(ids, first, at):
            at += len(first)
        ranges.append(range(at, max(at, min(at + length - len(first), len(ids)))))
        at += length - len(first)
    if ranges and len(first) + len(ranges[-1]) < least:
        ranges.pop()
    if len(ids) < 2 or not ranges:
        raise UsageError("text", got=f"{len(ids)} tokens", expected="at least 2", fix="Give a longer text.")
    return ranges


def calibration_windows(ids: Sequence[int], length: int, tokens: int, first: Sequence[int]) -> NDArray[np.int64]:
    """Windows of a calibration text, `[windows, length]`, at most `tokens` ids in total; a shorter window is dropped.

    Raises:
        UsageError: as `cut_windows`.
    """
    field = "--calibration-tokens" if tokens == length else "--context"
    windows = cut_windows(ids, length, first, field)[: max(1, tokens // length)]
    return np.stack([window for window in windows if len(window) == len(windows[0])])


def check_states_are_read(spec: DecoderSpec, length: int) -> None:
    """Refuse windows of `length` tokens, none of which reads what some token's state has of those before it.

    Such states would get the range of zeros, and be wiped in every text.

    Raises:
        UsageError: a window ends at or before the first checkpoint of states, or within a kernel.
    """
    kernel = 0 if spec.convolution_states is None else spec.convolution_states.kernel
    least, reader = kernel, f"the {kernel} that a convolution reads"
    if spec.delta_rule is not None and kernel <= CHECKPOINT_TOKENS:
        least, reader = CHECKPOINT_TOKENS + 1, f"more than {CHECKPOINT_TOKENS}, after which states are read"
    if length < least:
        raise UsageError(
            "calibration",
            got=f"windows of {length} tokens",
            expected=f"at least {least}: {reader}",
            fix="Give a longer calibration text, or more --calibration-tokens.",
        )


def as_chats(text: str, max_characters: int) -> list[Conversation]:
    """The paragraphs of a text as conversations: the user has the first sentence, and the assistant the rest.

    Args:
        text: the text.
        max_characters: of it, from its start; paragraphs are whole.
    """
    messages, used = list[dict[str, str]](), 0
    for paragraph in filter(None, map(str.strip, text.split("\n\n"))):
        first, _, rest = paragraph.partition(". ")
        if rest and used < max_characters:
            messages += [{"role": "user", "content": first + "."}, {"role": "assistant", "content": rest}]
            used += len(paragraph)
    return [messages[at : at + _MESSAGES] for at in range(0, len(messages), _MESSAGES)]


def rendered(templates: ChatTemplates, chats: Sequence[Conversation]) -> str:
    """Conversations in a chat template, one after another; empty if it refuses one."""
    try:
        return "".join(templates.render([*map(dict, chat)], add_generation_prompt=False) for chat in chats)
    except UsageError:
        return ""


def chat_opening(templates: ChatTemplates) -> str:
    """What a chat template puts before the first message of a user; empty if it fails, or changes the message."""
    message = "Hello"
    text = rendered(templates, [[{"role": "user", "content": message}]])
    return text[: max(0, text.rfind(message))]
