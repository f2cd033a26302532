"""A trial of a TFLite file in a child process, before this process loads it.

The runtimes trust the offsets and sizes in a file: one that was forged or damaged before it was hashed crashes the
process that loads or runs it. A hash does not help, because an attacker can compute it too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgekv.bundle import file_hashes
from edgekv.errors import EngineError
from edgekv.kv.memory import aligned_zeros
from edgekv.machine.child import CallFailedError, ChildEndedError, Limits, call, vendor_timeout_s
from edgekv.machine.system import cache_folder

_TRIAL_S = 300.0
"""To load a file and to run each graph once: a hundred times what a large model takes."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A file to load, and the name of the engine. Each of its graphs runs once on zeros."""

    engine: str
    file: str


class TriedFiles:
    """The `.tflite` files of an engine: each is tried in a child process, then loaded once."""

    def __init__(self, engine: str, runtime: str, load: Callable[[Path], Any], *, tried: bool) -> None:
        """Load nothing yet.

        Args:
            engine: name of the engine.
            runtime: its package and version.
            load: loads a file in this process.
            tried: load files without trying them first.
        """
        self._engine = engine
        self._runtime = runtime
        self._load = load
        self._tried = tried
        self._loaded: dict[Path, Any] = {}

    def load(self, file: Path) -> Any:
        """What `load` returned for the file.

        Raises:
            EngineError: see `try_file`, and what `load` raises.
        """
        if file not in self._loaded:
            if not self._tried:
                try_file(file, self._engine, self._runtime)
            self._loaded[file] = self._load(file)
        return self._loaded[file]


def try_file(file: Path, engine: str, runtime: str) -> None:
    """Load a file and run its graphs in a child process, unless a file of this content has passed before.

    Args:
        file: a `.tflite` file.
        engine: name of the engine.
        runtime: its package and version.

    Raises:
        EngineError: the runtime refused the file, crashed, or did not end.
    """
    with file_hashes() as hashes:
        content = f"{runtime} {hashes.sha256_of(file)}"
    passed = cache_folder() / "tried" / hashlib.sha256(content.encode()).hexdigest()
    if passed.exists():
        return
    try:
        call(run_all, Trial(engine=engine, file=str(file)), Limits(timeout_s=min(_TRIAL_S, vendor_timeout_s())))
    except ChildEndedError as error:
        raise EngineError(
            f"{file.name} on {runtime}",
            got=f"a crash or hang of the process that tried it: {error.ending}",
            expected="graphs that load and run",
            fix="The file is damaged or forged: export the bundle again.",
        ) from None
    except CallFailedError as error:  # the runtimes' exceptions have no common base
        raise EngineError(
            f"{file.name} on {engine}",
            got=error.text or error.kind,
            expected="graphs that load and run",
            fix="Export the bundle again with this edgekv.",
        ) from None
    with suppress(OSError):  # a cache that cannot be written only costs time
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


def run_all(trial: Trial) -> None:
    """Run each graph of a file for one step on zeros, in this process.

    Raises:
        EngineError: the runtime refused the file.
    """
    from edgekv.runtime.litert import LitertEngine  # they import this module
    from edgekv.runtime.tflite import TfliteEngine

    kind = LitertEngine if trial.engine == "litert" else TfliteEngine
    engine, file = kind(tried=True), Path(trial.file)
    for name in engine.graph_names(file):
        graph = engine.load(file, name)
        interface, alive = graph.interface, []
        for ports, bind in ((interface.inputs, graph.inputs), (interface.outputs, graph.outputs)):
            for port in ports:
                alive.append(array := aligned_zeros(port.shape, port.dtype))
                bind([port.name], np.dtype(port.dtype), port.shape, [array.ctypes.data])
        graph.run()
