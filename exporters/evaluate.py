"""How much of the checkpoint survived: perplexity and agreement of a bundle with its float32 reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

import edgekv
from edgekv.bundle import Manifest
from edgekv.errors import CheckpointError, UsageError
from exporters.calibrate import token_windows
from exporters.checkpoint import Checkpoint
from exporters.progress import Progress, silent
from exporters.reference import Floats, Reference


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Teacher forced, over all tokens that have a token before them.

    Attributes:
        tokens: tokens predicted.
        perplexity: exp of the mean negative log-likelihood under the bundle.
        reference_perplexity: the same under the float32 reference.
        perplexity_ratio: the first over the second.
        top1_agreement: share of positions at which both hold the same token most likely.
        sqnr_db: power of the reference's logits over that of the difference, in dB.
        engine: where the bundle ran.
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
    """The checkpoint that a bundle was made from, at its recorded place or at the one given.

    Its layers attend to as many tokens as those of the bundle.

    Raises:
        CheckpointError: it is not there, or its weights are others.
    """
    opened = Checkpoint.open(checkpoint or manifest.source.checkpoint)
    found = opened.weights_sha256()
    if found != manifest.source.weights_sha256:
        raise CheckpointError(
            f"weights of {opened.name}",
            found=f"sha256 {found[:12]}...",
            wanted=f"{manifest.source.weights_sha256[:12]}..., those that the bundle was made from",
            way_out="Name the right folder with --checkpoint.",
        )
    return opened.limited(manifest.windows)


def evaluate(
    model: edgekv.Model, checkpoint: Checkpoint, text: str, text_name: str, *, tokens: int, progress: Progress = silent
) -> Evaluation:
    """Run the text through the bundle's `score` graph and through the reference, window by window.

    Args:
        model: the bundle on an engine.
        checkpoint: the one it was made from.
        text: read in windows of the context length that do not overlap.
        text_name: for the report.
        tokens: stop after the window in which this many tokens are reached.
        progress: told of every window.
    """
    context = model.bundle.manifest.context
    windows = _limit(token_windows(checkpoint, text, context), tokens)
    reference = Reference(checkpoint, context).logits(windows)
    nll = reference_nll = signal = noise = 0.0
    agreed = count = 0
    for done, (window, expected) in enumerate(zip(windows, reference, strict=True)):
        progress("evaluate", done, len(windows))
        actual = model.score(window.tolist())
        nll += negative_log_likelihood(actual, window)
        reference_nll += negative_log_likelihood(expected, window)
        agreed += int((actual[:-1].argmax(-1) == expected[:-1].argmax(-1)).sum())
        signal += float(np.square(expected, dtype=np.float64).sum())
        noise += float(np.square(actual - expected, dtype=np.float64).sum())
        count += len(window) - 1
    progress("evaluate", len(windows), len(windows))
    perplexity, reference_perplexity = math.exp(nll / count), math.exp(reference_nll / count)
    return Evaluation(
        tokens=count,
        perplexity=perplexity,
        reference_perplexity=reference_perplexity,
        perplexity_ratio=perplexity / reference_perplexity,
        top1_agreement=agreed / count,
        sqnr_db=10 * math.log10(signal / max(noise, 1e-30)),
        engine=model.engine,
        text=text_name,
    )


def negative_log_likelihood(logits: Floats, tokens: NDArray[np.int64]) -> float:
    """The sum over all tokens but the first, in nats; `logits` is `[T, V]`, its last row is not used."""
    shifted = logits[:-1].astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    chosen = shifted[np.arange(len(tokens) - 1), tokens[1:]]
    return float((np.log(np.exp(shifted).sum(-1)) - chosen).sum())


def read_text(path: Path) -> str:
    """The file's text.

    Raises:
        UsageError: there is no such UTF-8 file.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "--text", found=f"{path}: {error}", wanted="a UTF-8 text file", way_out="Check the path."
        ) from error


def _limit(windows: Sequence[NDArray[np.int64]], tokens: int) -> list[NDArray[np.int64]]:
    kept: list[NDArray[np.int64]] = []
    for window in windows:
        left = tokens - sum(len(each) - 1 for each in kept)
        if left <= 0:
            break
        kept.append(window[: left + 1])
    return kept
