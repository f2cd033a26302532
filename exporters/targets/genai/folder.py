"""The folder that onnxruntime-genai loads: a record by which edgekv verifies it, and running it in a child process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from edgekv.errors import BundleError, EngineError, UsageError
from edgekv.machine.child import CallFailedError, ChildEndedError, call
from edgekv.spec.text import open_tokenizer
from exporters.targets.genai.config import TOKENIZER
from exporters.targets.genai.worker import GenaiJob, generate
from exporters.targets.record import TargetRecord, open_for

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GENAI_MANIFEST = "genai_bundle.json"
PACKAGE = "onnxruntime-genai"
TESTED = ("0.15.2", "0.16.0")
"""Versions that ran such folders on the CPU and on the HTP emulator; 0.17.1 and 0.18.0 choose another cache."""


class GenaiManifest(TargetRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`genai_bundle.json`. `checked` says whether the stacked graphs computed the bundle's integers.

    Attributes:
        context: S; prompt, padding and answer must fit.
        window: tokens per step of the prompt.
        pad_token: the id that no prompt may contain.
        shared_weights: both graphs are in one binary.
        sink: the tokens that the graphs begin every text with; prompts leave them out.
        left_out: names of verify graphs: onnxruntime-genai decodes one token a step.
    """

    context: int
    window: int
    pad_token: int
    shared_weights: bool
    sink: list[int]
    left_out: list[str]


@dataclass(frozen=True, slots=True)
class GenaiFolder:
    """A verified folder.

    Attributes:
        path: the folder, absolute.
        manifest: its `genai_bundle.json`.
    """

    path: Path
    manifest: GenaiManifest

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint.

        Raises:
            BundleError: `tokenizers` cannot read it.
        """
        fix = f"Write the folder again: edgekv bundle genai BUNDLE -o {self.path} --force"
        return open_tokenizer(self.path / TOKENIZER, BundleError, fix)


def open_genai_folder(path: Path) -> GenaiFolder:
    """Read a folder of `edgekv bundle genai`; every file is checked against its hash.

    Raises:
        BundleError: the folder is something else, or a file is missing or changed.
    """
    folder = path.absolute()
    return GenaiFolder(folder, open_for("genai", GenaiManifest, folder, GENAI_MANIFEST))


def check_version() -> str:
    """The version of onnxruntime-genai that is installed.

    Raises:
        EngineError: it is missing, or cannot run these folders.
    """
    try:
        installed = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        installed = "none"
    if installed not in TESTED:
        raise EngineError(
            PACKAGE,
            got=installed,
            expected=" or ".join(TESTED),
            fix='Install it: pip install "edgekv[genai]"',
        )
    return installed


def run_folder(folder: GenaiFolder, tokens: Sequence[int], max_new_tokens: int) -> list[int]:
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
    sink = folder.manifest.sink
    if list(tokens[: len(sink)]) == sink:
        tokens = tokens[len(sink) :]
    _check_prompt(folder.manifest, tokens)
    job = GenaiJob(folder=str(folder.path), tokens=list(tokens), max_new_tokens=max_new_tokens)
    try:
        return call(generate, job)
    except ChildEndedError as error:
        failure = error.ending
    except CallFailedError as error:  # the package raises RuntimeError and more
        failure = error.text or error.kind
    raise EngineError(
        f"{PACKAGE} on {folder.path}",
        got=failure,
        expected="generated tokens",
        fix="A binary that shares weights runs only on a Snapdragon; otherwise, please report this.",
    )


def _check_prompt(manifest: GenaiManifest, tokens: Sequence[int]) -> None:
    room, window = manifest.context - len(manifest.sink), manifest.window
    padded = -(-len(tokens) // window) * window
    if len(tokens) < 2:
        fix = "Give a longer prompt."
        raise UsageError("prompt", got=f"{len(tokens)} tokens", expected="at least 2", fix=fix)
    if manifest.pad_token in tokens:
        raise UsageError(
            "prompt",
            got=f"the id {manifest.pad_token}, the padding token",
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
