"""The child process behind `ForeignContender`: one line of JSON asks, one line answers."""

from __future__ import annotations

import os
import sys

import msgspec
import numpy as np

from exporters.compare.contender import Timing
from exporters.compare.messages import Answer, Measure, Open, Request, Score
from exporters.compare.runtimes import ForeignModel, load


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what runtimes print goes to the log
    model: ForeignModel | None = None
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        try:
            if isinstance(request, Open):
                model, answer = load(request), Answer()
            else:
                assert model is not None, "asked after it was opened"
                answer = _answer(model, request)
        except Exception as error:  # each runtime raises its own
            answer = Answer(error=" ".join(f"{type(error).__name__}: {error}".split()))
        answers.write(msgspec.json.encode(answer) + b"\n")


def _answer(model: ForeignModel, request: Score | Measure) -> Answer:
    if isinstance(request, Score):
        np.save(request.file, model.logits(request.tokens).astype(np.float32, copy=False))
        return Answer()
    return Answer(timing=Timing.of(model.generate(request.tokens, request.new)))


if __name__ == "__main__":
    main()
