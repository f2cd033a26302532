"""Genie on a folder, in a child process: a crash or hang of the library becomes an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from edgekv.errors import EngineError, UsageError
from edgekv.machine.child import TIMEOUT_VARIABLE, Child, ChildEndedError, Limits
from edgekv.machine.scratch import scratch_folder
from edgekv.qnn.library_fault import check_libraries
from edgekv.qnn.this_chip import find_chip
from edgekv.qnn.vendor_libraries import LIBRARIES, Platform, package_place, search_paths
from exporters.targets.genie.config import GenieConfig, Nodes
from exporters.targets.genie.worker import GenieStatusError, Piece, Request, run

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PACKAGE = "onnxruntime-qnn"
TESTED = "2.7.0"
LIBRARY = "Genie"
_INSTALL = 'Install it: pip install "edgekv[htp]"'


def find_library() -> Path:
    """Genie's library of the tested version, from the wheel. Nothing is loaded.

    Names of graphs are replaced within binaries, and the library is called without headers. Both are known to work
    with this version only.

    Raises:
        EngineError: the package is missing, has another version, or has no Genie for this machine.
    """
    on = Platform.here()
    place = package_place(on)
    if place is None:
        raise EngineError("Genie", got=f"no package {PACKAGE}", expected=f"{PACKAGE} {TESTED}", fix=_INSTALL)
    if (version := metadata.version(PACKAGE)) != TESTED:
        raise EngineError("Genie", got=f"{PACKAGE} {version}", expected=f"the tested {TESTED}", fix=_INSTALL)
    if not place.has(LIBRARY, on):
        raise EngineError(
            "Genie",
            got=f"no {place.folder / on.library(LIBRARY)}",
            expected="a wheel of Qualcomm's that has it",
            fix="Run this on Linux, or on Windows.",
        )
    return place.folder / on.library(LIBRARY)


_CONTEXT_FULL = 4
_MEANINGS = {_CONTEXT_FULL: "the context is full"}
_WAY_OUT = "A prompt must leave room in the context; else write the folder again with edgekv bundle genie."
_NOISE = ("LIBNATIVE", "affinity mask", '"Using create From Binary"')


class GenieChild:
    """libGenie.so in a child process, which is asked and answers; a context manager."""

    def __init__(self, arch: int | None) -> None:
        """Start it.

        Args:
            arch: HTP version of the binaries, for which this machine's libraries are checked; None for no check.

        Raises:
            EngineError: Genie is missing, or the libraries here do not fit the HTP.
        """
        self._library, on = find_library(), Platform.here()
        if arch is not None:
            check_libraries(LIBRARIES, arch, on, find_chip(on))
        self._child = Child(Limits(environment=search_paths(self._library.parent, on)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child process. A second call does nothing."""
        self._child.close()

    def _do(self, method: str, *arguments: str | int) -> None:
        for _ in self._request(method, *arguments):
            pass

    def _request(self, method: str, *arguments: str | int | list[int]) -> Iterator[Piece]:
        try:
            yield from self._child.stream(run, Request(method, [*arguments]))
        except GenieStatusError as error:
            raise self._failure(error.function, _MEANINGS.get(error.status, f"status {error.status}")) from None
        except ChildEndedError as error:
            if error.timed_out:
                raise self._failure(method, error.ending, f"Set {TIMEOUT_VARIABLE} to allow more time.") from None
            crashed = "The emulator on x86 crashes on a binary of several graphs: use genie_config.json there."
            raise self._failure(method, error.ending.partition(":")[0], crashed) from None

    def _failure(self, function: str, what: str, fix: str = _WAY_OUT) -> EngineError:
        said = "; ".join(line for line in self._child.log() if not any(noise in line for noise in _NOISE))
        return EngineError(
            f"Genie: {function}",
            got=f"{what}: {said}" if said else what,
            expected="status 0",
            fix=fix,
        )


class GenieDialog(GenieChild):
    """A conversation with Genie; a context manager. Queries continue the conversation until `reset`."""

    def __init__(
        self, folder: Path, config: GenieConfig, state: Path | None = None, *, arch: int | None = None
    ) -> None:
        """Load the binaries that the configuration names.

        Args:
            folder: against which the paths of the configuration are resolved.
            config: as `GenieFolder.config` gives it.
            state: with which every conversation begins, as `GenieFolder.state` gives it; None to begin empty.
            arch: HTP version of the binaries, for which this machine's libraries are checked; None for no check.

        Raises:
            EngineError: Genie is missing, refused the folder, or crashed, or the libraries here do not fit the HTP.
        """
        super().__init__(arch)
        self._state = state
        self._has_states = config.dialog.engine.model.linear_attention is True
        try:
            self._do("create", str(self._library), str(folder.absolute()), msgspec.json.encode(config).decode())
            self._begin()
        except BaseException:
            self.close()
            raise

    def query(self, text: str, max_new_tokens: int | None = None) -> Iterator[str]:
        """The answer to a text, piece by piece. Genie stops streaming at a byte that is not valid UTF-8.

        Raises:
            EngineError: the text does not fit the context, or Genie failed.
        """
        yield from map(str, self._answer("query", text, max_new_tokens))

    def token_query(self, tokens: Sequence[int], max_new_tokens: int | None = None) -> Iterator[int]:
        """The tokens that follow these. Genie puts the configuration's `bos-token` in front of the first query.

        Raises:
            EngineError: the tokens do not fit the context, or Genie failed.
        """
        for tokens_of_piece in self._answer("token_query", list(tokens), max_new_tokens):
            yield from map(int, tokens_of_piece)

    def save(self, path: Path) -> None:
        """Write the conversation's state into a folder that exists.

        Raises:
            UsageError: the model has states, which Genie 1.21 leaves out of what it saves.
        """
        if self._has_states:
            raise UsageError(
                "save",
                got="a model with states, which Genie leaves out of what it saves",
                expected="keys and values in every layer",
                fix="Keep the text, and query it again.",
            )
        self._do("save", str(path.absolute()))

    def restore(self, path: Path) -> None:
        """Resume from a saved state."""
        self._do("restore", str(path.absolute()))

    def apply_lora(self, name: str, state: Path | None = None) -> None:
        """Start a new conversation with an adapter. It stays until another is applied; none cannot be applied.

        Args:
            name: of an adapter of the configuration.
            state: with which conversations begin from now on, as `GenieFolder.adapter_state` gives it.
        """
        self._do("apply_lora", name)
        self._state = state
        self.reset()

    def reset(self) -> None:
        """Start a new conversation."""
        self._do("reset")
        self._begin()

    def _begin(self) -> None:
        if self._state is not None:
            self.restore(self._state)

    def _answer(self, method: str, prompt: Piece, max_new_tokens: int | None) -> Iterator[Piece]:
        if max_new_tokens is not None:
            self._do("set_max_new_tokens", max_new_tokens)
        yield from self._request(method, prompt)


class GeniePipeline(GenieChild):
    """Genie with an encoder for pictures; a context manager. Queries continue the conversation."""

    def __init__(self, folder: Path, nodes: Nodes, *, as_tokens: bool = False, arch: int | None = None) -> None:
        """Load the binaries that the nodes name.

        Args:
            folder: against which their paths are resolved.
            nodes: as `GenieFolder.nodes` gives them.
            as_tokens: whether answers are tokens instead of text.
            arch: HTP version of the binaries, for which this machine's libraries are checked; None for no check.

        Raises:
            EngineError: Genie is missing, refused the folder, or crashed, or the libraries here do not fit the HTP.
        """
        super().__init__(arch)
        files = (str(self._library), str(folder.absolute()), *(files.decode() for files in nodes.content()))
        try:
            self._do("create_pipeline", int(as_tokens), *files)
        except BaseException:
            self.close()
            raise

    def query(self, prompt: Sequence[str | NDArray[np.float32]]) -> Iterator[Piece]:
        """The answer to texts and pictures, the latter as `GenieVision.input_of` gives their tiles.

        Raises:
            EngineError: the prompt does not fit the context, or Genie failed.
        """
        with scratch_folder("genie") as scratch:
            for number, piece in enumerate(prompt):
                if isinstance(piece, str):
                    self._do("text", piece)
                else:
                    piece.tofile(file := scratch / f"{number}.raw")
                    self._do("image", str(file))
            yield from self._request("execute")
