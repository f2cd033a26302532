"""Perplexity and agreement of a bundle with the float32 reference of its checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

import edgekv
from edgekv.bundle import Manifest
from edgekv.errors import CheckpointError, UsageError
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.progress import Progress, silent
from exporters.quantize.calibrate import token_windows
from exporters.quantize.reference import Floats, Reference


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Teacher-forced metrics over all tokens but the first of each window.

    Attributes:
        tokens: number of tokens predicted.
        perplexity: exp of the mean negative log-likelihood under the bundle.
        reference_perplexity: the same under the float32 reference.
        perplexity_ratio: perplexity over reference_perplexity.
        top1_agreement: share of positions with the same most likely token.
        sqnr_db: SQNR of the logits, dB.
        engine: name of the engine.
        text: name of the text.
    """

    tokens: int
    perplexity: float
    reference_perplexity: float
    perplexity_ratio: float
    top1_agreement: float
    sqnr_db: float
    engine: str
    text: str


def open_source(manifest: Manifest, checkpoint: str | None) -> Checkpoint:
    """Open the checkpoint of a bundle, at its recorded path or at the one given, with the bundle's attention windows.

    Raises:
        CheckpointError: it is missing, or its weights differ.
    """
    opened = Checkpoint.open(checkpoint or manifest.source.checkpoint)
    found = opened.weights_sha256()
    if found != manifest.source.weights_sha256:
        raise CheckpointError(
            f"weights of {opened.name}",
            got=f"sha256 {found[:12]}...",
            expected=f"{manifest.source.weights_sha256[:12]}..., the weights of the bundle",
            fix="Give the original folder with --checkpoint.",
        )
    return opened.limited(manifest.windows)


def evaluate(
    model: edgekv.Model, checkpoint: Checkpoint, text: str, text_name: str, *, tokens: int, progress: Progress = silent
) -> Evaluation:
    """Run the text through the bundle's `score` graph and through the reference, window by window.

    Args:
        model: the bundle, loaded.
        checkpoint: the checkpoint of the bundle.
        text: split into non-overlapping windows of the context length.
        text_name: for the report.
        tokens: number of tokens to evaluate.
        progress: called after every window.
    """
    context = model.bundle.manifest.context
    windows = evaluation_windows(checkpoint, text, context, tokens)
    reference = Reference(checkpoint, context).logits(windows)
    tally = Tally()
    for done, (window, expected) in enumerate(zip(windows, reference, strict=True)):
        progress("evaluate", done, len(windows))
        tally.add(window, expected, model.score(window.tolist()))
    progress("evaluate", len(windows), len(windows))
    return tally.evaluation(model.engine, text_name)


class Tally:
    """Accumulates the metrics window by window."""

    def __init__(self) -> None:
        self._nll = self._reference_nll = self._signal = self._noise = 0.0
        self._agreed = self._tokens = 0

    def add(self, window: NDArray[np.int64], expected: Floats, actual: Floats) -> None:
        """Token ids `[T]`, and the logits `[T, V]` of the reference and of the bundle."""
        self._nll += negative_log_likelihood(actual, window)
        self._reference_nll += negative_log_likelihood(expected, window)
        self._agreed += int((actual[:-1].argmax(-1) == expected[:-1].argmax(-1)).sum())
        self._signal += float(np.square(expected, dtype=np.float64).sum())
        self._noise += float(np.square(actual - expected, dtype=np.float64).sum())
        self._tokens += len(window) - 1

    def evaluation(self, engine: str, text: str) -> Evaluation:
        """The metrics over all windows."""
        perplexity, reference = (math.exp(each / self._tokens) for each in (self._nll, self._reference_nll))
        return Evaluation(
            tokens=self._tokens,
            perplexity=perplexity,
            reference_perplexity=reference,
            perplexity_ratio=perplexity / reference,
            top1_agreement=self._agreed / self._tokens,
            sqnr_db=10 * math.log10(self._signal / max(self._noise, 1e-30)),
            engine=engine,
            text=text,
        )


def negative_log_likelihood(logits: Floats, tokens: NDArray[np.int64]) -> float:
    """Sum over all tokens but the first, in nats; `logits` is `[T, V]`, its last row is unused."""
    shifted = logits[:-1].astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    chosen = shifted[np.arange(len(tokens) - 1), tokens[1:]]
    return float((np.log(np.exp(shifted).sum(-1)) - chosen).sum())


def read_text(path: Path) -> str:
    """Read a UTF-8 text file.

    Raises:
        UsageError: the file is missing or not UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "--text", got=f"{path}: {error}", expected="a UTF-8 text file", fix="Check the path."
        ) from error


def evaluation_windows(checkpoint: Checkpoint, text: str, context: int, tokens: int) -> list[NDArray[np.int64]]:
    """Split a text into non-overlapping windows of the context length, with `tokens` predicted tokens in all.

    Raises:
        UsageError: the text has fewer than two tokens.
    """
    kept: list[NDArray[np.int64]] = []
    for window in token_windows(checkpoint, text, context):
        left = tokens - sum(len(each) - 1 for each in kept)
        if left <= 0:
            break
        kept.append(window[: left + 1])
    return kept
