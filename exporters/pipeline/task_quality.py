"""What a bundle of an embedder or a reranker lost: a piece that compares it with the float model on a few texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import EmbeddingQuality, RankingQuality, open_bundle
from edgekv.embed import activated, pair_tokens, pooled
from edgekv.machine.scratch import scratch_folder
from edgekv.spec import EmbeddingTask, Task
from edgekv.spec.text import begins_with
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.inspect.held_out import held_out_prose
from exporters.inspect.tally import Doubles
from exporters.pipeline.inputs import DecoderKey, Inputs
from exporters.pipeline.piece import Piece
from exporters.pipeline.quality import TracedRun
from exporters.quantize.reference import Floats, Reference

MEASURED_TOKENS = 64
"""Of a text, at most."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_MIN_WORDS = 6
_QUERIES = 8


@dataclass(frozen=True, slots=True)
class TaskQualityPiece(Piece):
    """How close embeddings or scores are to the float model's; answers `EmbeddingQuality` or `RankingQuality`.

    The texts are sentences that no model is calibrated on; the second half of each looks for it among all, or, of a
    reranker, some of them do among as many.

    Attributes:
        bundle: name of the written bundle.
        exact: the decoder.
        tokenizer: see `Identity`.
        task: how rows become embeddings or scores.
        context: of the bundle.
    """

    kind: ClassVar[str] = "task_quality"

    bundle: str
    exact: DecoderKey
    tokenizer: str
    task: Task
    context: int

    @property
    def needs(self) -> tuple[str, ...]:
        return self.bundle, *self.exact.needs

    def make(self, folder: Path, inputs: Inputs) -> EmbeddingQuality | RankingQuality:
        checkpoint = inputs.text_checkpoint(self.exact, self.tokenizer)
        bundle = open_bundle(inputs.bundle(self.bundle), verify=False)
        sink, layers = bundle.manifest.sink, bundle.manifest.model.layers
        first, most = [] if sink is None else sink.tokens, min(self.context, MEASURED_TOKENS)
        windows = list[NDArray[np.int64]]()
        for ids in self._texts(checkpoint):
            windows.append(np.array((ids if begins_with(ids, first) else [*first, *ids])[:most]))

        def told(done: int) -> None:
            inputs.progress("measure", done, 2 * layers)

        reference = Reference(inputs.exact(self.exact), self.context)
        exact = _rows(reference.head_blocks(reference.states(windows, progress=told)))
        with scratch_folder("quality") as scratch:
            actual = _rows(TracedRun(bundle, inputs.threads, None, []).blocks(windows, scratch))
        told(2 * layers)
        task = self.task
        if isinstance(task, EmbeddingTask):
            return compared(*(np.stack([pooled(task, row) for row in rows]) for rows in (exact, actual)))
        scores = [np.array([activated(task, float(row[-1, 0])) for row in rows]) for rows in (exact, actual)]
        return compared_scores(*(score.reshape(_QUERIES, -1) for score in scores))

    def _texts(self, checkpoint: Checkpoint) -> Iterator[list[int]]:
        """The tokens of each text."""
        texts = search_texts(held_out_prose())
        if isinstance(self.task, EmbeddingTask):
            yield from (checkpoint.encode(text, around=True) for text in texts)
            return
        half, vocab = len(texts) // 2, checkpoint.spec.vocab
        for query in texts[half : half + _QUERIES]:
            for document in texts[:_QUERIES]:
                yield pair_tokens(checkpoint.tokenizer, self.task, query, document, vocab=vocab)[0]


def _rows(blocks: Iterator[list[Floats]]) -> list[Floats]:
    """Those of each text, `[T, width]`, of some columns of all after the others."""
    return [np.concatenate(parts, axis=-1) for parts in zip(*blocks, strict=True)]


def search_texts(prose: str) -> list[str]:
    """Sentences of a text, and behind them the second half of each."""
    sentences = [sentence for sentence in _SENTENCE.split(prose) if len(sentence.split()) >= _MIN_WORDS]
    return [*sentences, *(" ".join(sentence.split()[len(sentence.split()) // 2 :]) for sentence in sentences)]


def compared(exact: Floats, actual: Floats) -> EmbeddingQuality:
    """How close embeddings `[texts, width]` are to exact ones; the second half of them looks for the first.

    An embedding of zeros, or one that is not finite, has no direction: its cosine is 0.
    """
    exact, actual = _unit(exact), _unit(actual)
    cosines = (exact * actual).sum(-1)
    half = len(exact) // 2
    firsts = [(embeddings[half:] @ embeddings[:half].T).argmax(-1) for embeddings in (exact, actual)]
    return EmbeddingQuality(
        texts=len(exact),
        cosine=float(cosines.mean()),
        min_cosine=float(cosines.min()),
        same_first=float((firsts[0] == firsts[1]).mean()),
    )


def compared_scores(exact: Doubles, actual: Doubles) -> RankingQuality:
    """How close scores `[queries, documents]` are to exact ones. One that is not finite differs by 1."""
    apart = np.nan_to_num(np.abs(exact - actual), nan=1.0, posinf=1.0)
    return RankingQuality(
        pairs=exact.size,
        difference=float(apart.mean()),
        max_difference=float(apart.max()),
        same_first=float((exact.argmax(-1) == actual.argmax(-1)).mean()),
    )


def _unit(vectors: Floats) -> Floats:
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    with np.errstate(all="ignore"):
        normalized: Floats = np.nan_to_num(vectors / lengths, nan=0.0, posinf=0.0, neginf=0.0)
    return normalized
