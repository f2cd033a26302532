"""A model that another runtime computes, in a child process: a crash or hang of it becomes an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.errors import EngineError
from edgekv.machine.child import TIMEOUT_VARIABLE
from edgekv.machine.child_dialog import ChildDialog
from edgekv.machine.scratch import scratch_folder
from edgekv.spec.chat import ChatTemplates
from exporters.compare.contender import Described, Timing
from exporters.compare.messages import Answer, Measure, Open, Request, RuntimeName, Score
from exporters.quantize.reference import Floats

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ForeignContender:
    """A file or folder of another runtime; see `Contender`. It is loaded when it is first needed."""

    must_begin = False

    def __init__(
        self,
        runtime: RuntimeName,
        described: Described,
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
        self._child: ChildDialog | None = None
        self._folder = Path()

    def logits(self, windows: Sequence[NDArray[np.int64]], /) -> Iterator[Floats]:
        for window in windows:
            self._ask(Score(tokens=window.tolist(), file=str(self._file())))
            yield np.load(self._file(), allow_pickle=False)

    def time(self, tokens: Sequence[int], new: int, /) -> Timing:
        timing = self._ask(Measure(tokens=list(tokens), new=new)).timing
        assert timing is not None, "the answer to Measure"
        return timing

    def close(self) -> None:
        self._resources.close()
        self._child = None

    def _file(self) -> Path:
        if self._child is None:
            self._start()
        return self._folder / "logits.npy"

    def _start(self) -> ChildDialog:
        self._folder = self._resources.enter_context(scratch_folder("compare"))
        self._child = self._resources.enter_context(ChildDialog("exporters.compare.worker"))
        self._ask(self._open)
        return self._child

    def _ask(self, request: Request) -> Answer:
        child = self._child or self._start()
        line = child.read() if child.send(msgspec.json.encode(request)) else b""
        answer = msgspec.json.decode(line, type=Answer) if line else None
        if answer is not None and answer.error is None:
            return answer
        fix = "Check that the runtime itself runs the model."
        if answer is not None:
            found = answer.error
        elif child.timed_out:
            found, fix = f"no answer within {child.timeout_s:g} s", f"Set {TIMEOUT_VARIABLE} to allow more time."
        else:
            found = ": ".join([child.exit_text(), *child.log()[-1:]])
        what = {Open: "a model that it loads", Score: "logits", Measure: "generated tokens"}[type(request)]
        raise EngineError(f"{self._open.runtime} on {self._open.path}", got=found, expected=what, fix=fix)
