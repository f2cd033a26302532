"""Running a folder with onnxruntime-genai itself, in a child process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgekv.child import run_in_child
from edgekv.errors import BundleError, EngineError, UsageError
from edgekv.json_file import read_json
from edgekv.spec.text import open_tokenizer
from exporters.targets.expected_folder import expect_folder_for
from exporters.targets.genai.config import CONFIG, SINK, TOKENIZER, FirstTokens, GenaiConfig
from exporters.targets.genai.messages import GenaiJob, GenaiReply

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PACKAGE = "onnxruntime-genai"
TESTED = ("0.15.2", "0.16.0")
"""Versions that ran such folders on the CPU and on the HTP emulator; 0.17.1 and 0.18.0 choose another cache."""

_WRITE_AGAIN = "Write it again: edgekv bundle genai BUNDLE -o DIR --force"


def check_version() -> str:
    """The version of onnxruntime-genai that is installed.

    Raises:
        EngineError: it is missing, or cannot run these folders.
    """
    try:
        found = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        found = "none"
    if found not in TESTED:
        raise EngineError(
            PACKAGE,
            got=found,
            expected=" or ".join(TESTED),
            fix='Install it: pip install "edgekv[genai]"',
        )
    return found


@dataclass(frozen=True, slots=True)
class OpenedFolder:
    """A folder whose configuration was read.

    Attributes:
        path: the folder, absolute.
        config: its `genai_config.json`.
        first: the tokens that the graphs begin every text with; prompts may leave them out.
    """

    path: Path
    config: GenaiConfig
    first: list[int]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint.

        Raises:
            BundleError: the folder has none, or `tokenizers` cannot read it.
        """
        return open_tokenizer(self.path / TOKENIZER, BundleError, _WRITE_AGAIN)


def open_folder(path: Path) -> OpenedFolder:
    """Read the configuration of a folder.

    Raises:
        BundleError: the folder is something else, or its configuration is missing or not one of `write_folder`.
    """
    expect_folder_for("genai", path)
    config = read_json(path / CONFIG, GenaiConfig, expected="a folder that edgekv bundle genai wrote", fix=_WRITE_AGAIN)
    first = []
    if (path / SINK).is_file():
        first = read_json(path / SINK, FirstTokens, expected="token ids", fix=_WRITE_AGAIN).tokens
    return OpenedFolder(path.absolute(), config, first)


def run_folder(folder: OpenedFolder, tokens: Sequence[int], max_new_tokens: int) -> list[int]:
    """The greedy continuation of a prompt, including the end token if there is one.

    Args:
        folder: the folder.
        tokens: the prompt.
        max_new_tokens: most tokens to generate; the context may end earlier.

    Raises:
        UsageError: a prompt that onnxruntime-genai would misread silently, or that does not fit.
        EngineError: onnxruntime-genai is missing, of another version, failed, or crashed.
    """
    check_version()
    first = len(folder.first)
    if list(tokens[:first]) == folder.first:
        tokens = tokens[first:]
    _check_prompt(folder.config, tokens, first)
    job = GenaiJob(folder=str(folder.path), tokens=list(tokens), max_new_tokens=max_new_tokens)
    end = run_in_child("exporters.targets.genai.worker", msgspec.json.encode(job))
    reply = GenaiReply() if end.reply is None else msgspec.json.decode(end.reply, type=GenaiReply)
    if end.reply is None or reply.error is not None:
        raise EngineError(
            f"{PACKAGE} on {folder.path}",
            got=reply.error or end.ending,
            expected="generated tokens",
            fix="A binary that shares weights runs only on a Snapdragon; otherwise, please report this.",
        )
    return reply.tokens


def _check_prompt(config: GenaiConfig, tokens: Sequence[int], first: int) -> None:
    model = config.model
    room = model.context_length - first
    window = model.decoder.sliding_window.window_size
    padded = -(-len(tokens) // window) * window
    if len(tokens) < 2:
        fix = "Give a longer prompt."
        raise UsageError("prompt", got=f"{len(tokens)} tokens", expected="at least 2", fix=fix)
    if model.pad_token_id in tokens:
        raise UsageError(
            "prompt",
            got=f"the id {model.pad_token_id}, the padding token",
            expected="a prompt without it",
            fix="Choose another --pad-token-id when the folder is written.",
        )
    if padded >= room:
        raise UsageError(
            "prompt",
            got=f"{len(tokens)} tokens, {padded} with padding",
            expected=f"less than the context of {room}",
            fix="Shorten it, or export with a larger --context.",
        )
