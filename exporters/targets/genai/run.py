"""Running a folder with onnxruntime-genai itself, in a child process."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from edgekv.errors import EngineError, UsageError
from edgekv.machine.child import CallFailedError, ChildEndedError, call
from exporters.targets.genai.folder import GenaiFolder, GenaiManifest
from exporters.targets.genai.worker import GenaiJob, generate

PACKAGE = "onnxruntime-genai"
TESTED = ("0.15.2", "0.16.0")
"""Versions that ran such folders on the CPU and on the HTP emulator; 0.17.1 and 0.18.0 choose another cache."""


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
