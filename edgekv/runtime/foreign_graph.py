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

from edgekv.bundle import file_hashes
from edgekv.errors import EngineError
from edgekv.machine.child import run_in_child, vendor_timeout_s
from edgekv.machine.system import cache_folder

_TRIAL_S = 300.0
"""To load a file and to run each graph once: a hundred times what a large model takes."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A file to load, and the name of the engine. Each of its graphs runs once on zeros."""

    engine: str
    file: str


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an `EngineError`."""

    field: str
    got: str
    expected: str
    fix: str


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
    job = msgspec.json.encode(Trial(engine=engine, file=str(file)))
    end = run_in_child("edgekv.runtime.foreign_graph_worker", job, timeout_s=min(_TRIAL_S, vendor_timeout_s()))
    if end.reply is None:
        raise EngineError(
            f"{file.name} on {runtime}",
            got=f"a crash or hang of the process that tried it: {end.ending}",
            expected="graphs that load and run",
            fix="The file is damaged or forged: export the bundle again.",
        )
    refusal = msgspec.json.decode(end.reply, type=Refusal | None)
    if refusal is not None:
        raise EngineError(refusal.field, got=refusal.got, expected=refusal.expected, fix=refusal.fix)
    with suppress(OSError):  # a cache that cannot be written only costs time
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()
