"""A trial of a TFLite file in a child process, before this process loads it.

The runtimes trust the offsets and sizes in a file: one that was forged or damaged before it was hashed crashes the
process that loads or runs it. A hash does not help, because an attacker can compute it too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edgekv.bundle import file_hashes
from edgekv.errors import EngineError
from edgekv.kv.memory import aligned_zeros
from edgekv.machine.child import CallFailedError, ChildEndedError, Limits, call, vendor_timeout_s
from edgekv.machine.system import cache_folder
from edgekv.runtime.binding import Binding

_TRIAL_S = 300.0
"""To load a file and to run each graph once: a hundred times what a large model takes."""


class CrashCheckedFiles:
    """The `.tflite` files of an engine: each is tried in a child process, then loaded once."""

    def __init__(self, runtime: str, load: Callable[[Path], Any], trial: Callable[[str], None] | None) -> None:
        """Load nothing yet.

        Args:
            runtime: its package and version.
            load: loads a file in this process.
            trial: runs all graphs of a file once, in a child process; None loads files without it.
        """
        self._runtime = runtime
        self._load = load
        self._trial = trial
        self._loaded: dict[Path, Any] = {}

    def load(self, file: Path) -> Any:
        """What `load` returned for the file.

        Raises:
            EngineError: see `try_file`, and what `load` raises.
        """
        if file not in self._loaded:
            if self._trial is not None:
                try_file(file, self._runtime, self._trial)
            self._loaded[file] = self._load(file)
        return self._loaded[file]


def try_file(file: Path, runtime: str, trial: Callable[[str], None]) -> None:
    """Load a file and run its graphs in a child process, unless a file of this content has passed before.

    Args:
        file: a `.tflite` file.
        runtime: its package and version.
        trial: runs all graphs of a file once.

    Raises:
        EngineError: the runtime refused the file, crashed, or did not end.
    """
    with file_hashes() as hashes:
        content = f"{runtime} {hashes.sha256_of(file)}"
    passed = cache_folder() / "tried" / hashlib.sha256(content.encode()).hexdigest()
    if passed.exists():
        return
    try:
        call(trial, str(file), Limits(timeout_s=min(_TRIAL_S, vendor_timeout_s())))
    except ChildEndedError as error:
        raise EngineError(
            f"{file.name} on {runtime}",
            got=f"a crash or hang of the process that tried it: {error.ending}",
            expected="graphs that load and run",
            fix="The file is damaged or forged: export the bundle again.",
        ) from None
    except CallFailedError as error:  # the runtimes' exceptions have no common base
        raise EngineError(
            f"{file.name} on {runtime}",
            got=error.text or error.kind,
            expected="graphs that load and run",
            fix="Export the bundle again with this edgekv.",
        ) from None
    with suppress(OSError):  # a cache that cannot be written only costs time
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


class FileEngine(Protocol):
    """An engine of files that hold several graphs."""

    def graph_names(self, file: Path) -> Sequence[str]:
        """The graphs of a file."""

    def load(self, file: Path, name: str) -> Binding:
        """One of them."""


def run_all(engine: FileEngine, file: Path) -> None:
    """One step of each graph of a file, whose inputs are zeros, in this process.

    Raises:
        EngineError: the runtime refused the file.
    """
    for name in engine.graph_names(file):
        graph = engine.load(file, name)
        interface, alive = graph.interface, []
        for ports, bind in ((interface.inputs, graph.inputs), (interface.outputs, graph.outputs)):
            for port in ports:
                alive.append(array := aligned_zeros(port.shape, port.dtype))
                bind([port.name], np.dtype(port.dtype), port.shape, [array.ctypes.data])
        graph.run()
