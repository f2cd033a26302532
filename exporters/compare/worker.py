"""A model of another runtime in a child process; see `ForeignContender`."""

from __future__ import annotations

import numpy as np

from exporters.compare.contender import Timing
from exporters.compare.messages import Measure, Open, Score
from exporters.compare.runtimes import ForeignModel, load

_opened: list[ForeignModel] = []


def open_model(job: Open) -> None:
    """Load the model that later calls use."""
    _opened[:] = [load(job)]


def score(job: Score) -> None:
    """Write logits."""
    np.save(job.file, _opened[0].logits(job.tokens).astype(np.float32, copy=False))


def measure(job: Measure) -> Timing:
    """Generate."""
    return Timing.of(_opened[0].generate(job.tokens, job.new))
