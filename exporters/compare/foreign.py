"""A model that another runtime computes, in a child process: a crash or hang of it becomes an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import EngineError
from edgekv.machine.child import CallFailedError, Child, ChildEndedError, Job, Reply
from edgekv.machine.scratch import scratch_folder
from edgekv.spec.chat import ChatTemplates
from exporters.compare.contender import ContenderDescription, Timing
from exporters.compare.messages import Measure, Open, RuntimeName, Score
from exporters.compare.worker import measure, open_model, score
from exporters.quantize.reference import Floats

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ForeignContender:
    """A file or folder of another runtime; see `Contender`. It is loaded when it is first needed."""

    must_begin = False

    def __init__(
        self,
        runtime: RuntimeName,
        described: ContenderDescription,
        tokenizer: Tokenizer | None,
        first: Sequence[int],
        threads: int | None,
        chat: ChatTemplates | None = None,
    ) -> None:
        self.described = described
        self.chat = chat
        self.tokenizer = tokenizer
        self.first = first
        self._open = Open(runtime=runtime, path=described.path, context=described.context, threads=threads)
        self._resources = ExitStack()
        self._child: Child | None = None
        self._folder = Path()

    def logits(self, windows: Sequence[NDArray[np.int64]], /) -> Iterator[Floats]:
        for window in windows:
            child = self._opened()
            file = self._folder / "logits.npy"
            self._ask(child, score, Score(tokens=window.tolist(), file=str(file)), "logits")
            yield np.load(file, allow_pickle=False)

    def time(self, tokens: Sequence[int], new: int, /) -> Timing:
        return self._ask(self._opened(), measure, Measure(tokens=list(tokens), new=new), "generated tokens")

    def close(self) -> None:
        self._resources.close()
        self._child = None

    def _opened(self) -> Child:
        if self._child is None:
            self._folder = self._resources.enter_context(scratch_folder("compare"))
            child = self._resources.enter_context(Child())
            self._ask(child, open_model, self._open, "a model that it loads")
            self._child = child
        return self._child

    def _ask(self, child: Child, function: Callable[[Job], Reply], job: Job, expected: str) -> Reply:
        try:
            return child.call(function, job)
        except ChildEndedError as error:
            got = error.ending
        except CallFailedError as error:  # each runtime raises its own
            got = str(error)
        fix = "Check that the runtime itself runs the model."
        raise EngineError(f"{self._open.runtime} on {self._open.path}", got=got, expected=expected, fix=fix)
