"""Perplexity and agreement of a bundle with the float32 reference of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

import edgekv
from edgekv.bundle import Bundle, Manifest
from edgekv.errors import CheckpointError, UsageError
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.lora import AdapterChoice
from exporters.inspect.tally import Evaluation, ModeAgreement, Tally
from exporters.inspect.wikitext import Pages, Window, measured_windows
from exporters.progress import Progress, silent
from exporters.quantize.calibrate import token_windows
from exporters.quantize.reference import Floats, Reference


def open_source(manifest: Manifest, checkpoint: str | None, adapters: Sequence[Path] = ()) -> Checkpoint:
    """Open the checkpoint of a bundle, with the adapters that were merged into it as its decoder was exported.

    Args:
        manifest: has the places of the export.
        checkpoint: the checkpoint's new place, if it has moved.
        adapters: the folders of all adapters in the order of the export, if they have moved.

    Raises:
        CheckpointError: it or an adapter is missing, or its weights differ.
        UsageError: the bundle has another number of adapters.
    """
    merged = manifest.source.adapters
    if adapters and len(adapters) != len(merged):
        names = ", ".join(Path(record.folder).name for record in merged)
        raise UsageError(
            "--lora",
            got=len(adapters),
            expected=f"{len(merged)}, as many as the export had: {names}" if merged else "0: no adapter was merged",
            fix="Give all of them, in this order." if merged else "Leave it out.",
        )
    folders = adapters or [Path(record.folder) for record in merged]
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise CheckpointError(
            f"adapter {missing[0]}",
            got="no such folder",
            expected="the adapter that was merged into the bundle",
            fix="Give its new place with --lora.",
        )
    choices = [AdapterChoice(folder, record.scale) for folder, record in zip(folders, merged, strict=True)]
    opened = Checkpoint.open(checkpoint or manifest.source.checkpoint, choices)
    for adapter, record in zip(opened.adapters, merged, strict=True):
        _check_hash(f"adapter {adapter.folder}", adapter.sha256, record.sha256, "the adapter", "--lora")
    digest = opened.weights_sha256()
    _check_hash(f"weights of {opened.name}", digest, manifest.source.weights_sha256, "the weights", "--checkpoint")
    return opened.as_spec(msgspec.structs.replace(manifest.model, vocabulary="apart"))


def _check_hash(what: str, got: str, expected: str, noun: str, option: str) -> None:
    if got != expected:
        raise CheckpointError(
            what,
            got=f"sha256 {got[:12]}...",
            expected=f"{expected[:12]}..., {noun} of the bundle",
            fix=f"Give the original folder with {option}.",
        )


def check_writes_text(bundle: Bundle) -> None:
    """Refuse a bundle whose head gives no logits of the vocabulary.

    Raises:
        UsageError: it is an embedder's or a reranker's.
    """
    if (task := bundle.manifest.task) is not None:
        fix = "Its export prints how close it is to the float model; edgekv info shows it again."
        raise UsageError(str(bundle.path), got=task.noun, expected="a bundle that writes text", fix=fix)


class Logits(Protocol):
    """Logits to compare with."""

    def logits(self, windows: Sequence[NDArray[np.int64]], /) -> Iterator[Floats]:
        """Yield the logits `[T, V]` of each window of token ids `[T]`."""


def evaluate(
    model: edgekv.Model,
    checkpoint: Checkpoint,
    text: str,
    text_name: str,
    *,
    tokens: int,
    reference: Logits | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Run the text through the bundle's `score` graph and through the reference, window by window.

    Args:
        model: the bundle, loaded.
        checkpoint: the checkpoint of the bundle.
        text: split into non-overlapping windows of the context length.
        text_name: for the report.
        tokens: number of tokens to evaluate.
        reference: logits of the checkpoint; None to compute them.
        progress: called after every window.
    """
    windows = evaluation_windows(checkpoint, text, model.bundle.manifest, tokens)
    exact = reference or Reference(checkpoint, model.bundle.manifest.context)
    return evaluate_windows(model, exact, windows, text_name, progress=progress)


def evaluate_windows(
    model: edgekv.Model,
    reference: Logits,
    windows: Sequence[Window],
    text_name: str,
    *,
    pages: Pages | None = None,
    emulated: edgekv.Model | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Like `evaluate`, for windows; `pages` are those that they are of, for their word perplexity.

    With `emulated`, the bundle in the mode `emulate`, the model's agreement with it is measured too.
    """
    tally, against = Tally(), Tally()
    logits = reference.logits([window.inputs for window in windows])
    for done, (window, expected) in enumerate(zip(windows, logits, strict=True)):
        progress("evaluate", done, len(windows))
        tally.add(window, expected, actual := model.score(window.inputs.tolist()))
        if emulated is not None:
            against.add(window, emulated.score(window.inputs.tolist()), actual)
    progress("evaluate", len(windows), len(windows))
    result = tally.evaluation(model.engine.name, text_name, pages)
    if emulated is None:
        return result
    compared = against.evaluation(model.engine.name, text_name)
    agreement = ModeAgreement(
        mode=model.engine.name.removeprefix("cpu-"), kl_nats=compared.kl_nats, top1_agreement=compared.top1_agreement
    )
    return msgspec.structs.replace(result, agreement=agreement)


def evaluation_windows(checkpoint: Checkpoint, text: str, manifest: Manifest, tokens: int) -> list[Window]:
    """Split a text into non-overlapping windows of the context length, with `tokens` predicted tokens in all.

    Every window begins as the bundle's sequences do: with its sink, or with the BOS token if there is one.

    Raises:
        UsageError: the text has fewer than two tokens.
    """
    sink = [] if manifest.sink is None else manifest.sink.tokens
    return measured_windows(token_windows(checkpoint, text, manifest.context, first=sink or None), sink, tokens)
