"""Graphs on a phone by qnn-net-run, the program of Qualcomm's SDK that runs a context binary on files."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import EngineError
from edgekv.machine.scratch import scratch_folder
from exporters.targets.android.adb import Adb
from exporters.targets.android.run import folder_there, search_paths

NET_RUN = "qnn-net-run"

_INPUTS, _LIST, _OUTPUTS, _LOG = "inputs", "list.txt", "outputs", "log"
_TAIL_BYTES = 2000
_SIGNALLED = 128  # how a shell says that a signal ended a program
_MAX_SIGNAL = 64
_NATIVE = "_native"

Arrays = Mapping[str, NDArray[Any]]


class EndedOnPhoneError(EngineError):
    """A signal ended the program.

    Attributes:
        ending: name of the signal.
    """

    def __init__(self, ending: str, said: str) -> None:
        fix = "Look at: adb logcat"
        super().__init__(f"{NET_RUN} on the phone", got=f"{ending}: {said}", expected="results", fix=fix)
        self.ending = ending


@dataclass(frozen=True, slots=True)
class NetRun:
    """qnn-net-run on a phone. Paths on it are absolute.

    Attributes:
        adb: the phone.
        libraries: folder of the program and the libraries.
        folder: receives a folder for each run, which is removed again.
    """

    adb: Adb
    libraries: str
    folder: str

    def run(self, binary: str, cases: Sequence[Arrays], results: Sequence[Arrays]) -> list[dict[str, NDArray[Any]]]:
        """Run a context binary of one graph.

        Args:
            binary: on the phone.
            cases: inputs of each run, by name.
            results: arrays of the shapes and types of the outputs of each run, by name.

        Returns:
            Outputs of each run. One of another size than it should have is flat.

        Raises:
            EngineError: the program refused the graph, or gave no such output.
            EndedOnPhoneError: a signal ended it.
            LostPhoneError: the phone was lost.
        """
        with self._pushed(cases) as (here, there):
            self._start(binary, there)
            self.adb.pull(f"{there}/{_OUTPUTS}", here / _OUTPUTS)
            folders = [here / _OUTPUTS / f"Result_{number}" for number in range(len(cases))]
            return [_read(folder, like) for folder, like in zip(folders, results, strict=True)]

    def time_s(self, binary: str, inputs: Arrays, count: int) -> tuple[float, float]:
        """Times of a start of the program with one run of a graph, and of `count` further runs, in seconds.

        A run includes reading its inputs from files. The second is the difference of two starts, so that loading is
        not in it; only the last results are written.

        Raises:
            EngineError: as `run`, or the further runs took no time that can be measured.
        """
        with self._pushed([inputs]) as (_, there):
            once_s = self._start(binary, there, "--keep_num_outputs 1 --num_inferences 1")
            spent_s = self._start(binary, there, f"--keep_num_outputs 1 --num_inferences {count + 1}") - once_s
        if spent_s <= 0:
            got = f"{spent_s * 1e3:.1f} ms for {count} runs"
            raise EngineError(binary, got=got, expected="time that can be measured", fix="Run it again.")
        return once_s, spent_s

    @contextmanager
    def _pushed(self, cases: Sequence[Arrays]) -> Iterator[tuple[Path, str]]:
        """A folder here, and one on the phone that has files of the inputs, and a list of them."""
        with scratch_folder("net-run") as here, folder_there(self.adb, self.folder) as there:
            inputs, lines = here / _INPUTS, list[str]()
            inputs.mkdir()
            for number, arrays in enumerate(cases):
                files = {name: f"{number}_{at}.raw" for at, name in enumerate(arrays)}
                for name, file in files.items():
                    (inputs / file).write_bytes(np.ascontiguousarray(arrays[name]).tobytes())
                lines.append(" ".join(f"{name}:={there}/{_INPUTS}/{file}" for name, file in files.items()))
            (inputs / _LIST).write_text("\n".join(lines) + "\n")
            self.adb.push(inputs, f"{there}/{_INPUTS}")
            yield here, there

    def _start(self, binary: str, there: str, options: str = "") -> float:
        """Start the program in a folder of the phone; how long it ran, in seconds by the phone's clock."""
        # `date` of Android's toybox has nanoseconds.
        command = (
            f"cd {there} && export {search_paths(self.libraries)} && date +%s%N && "
            f"{{ {quote(f'{self.libraries}/{NET_RUN}')} --backend {quote(f'{self.libraries}/libQnnHtp.so')} "
            f"--retrieve_context {quote(binary)} --input_list {_INPUTS}/{_LIST} --output_dir {_OUTPUTS} "
            f"--use_native_input_files --use_native_output_files --perf_profile burst {options} > {_LOG} 2>&1 & "
            f"echo $! > pid; wait $!; code=$?; date +%s%N; "
            f"test $code = 0 || tail -c {_TAIL_BYTES} {_LOG}; exit $code; }}"
        )
        end = self.adb.shell(command)
        lines = end.output.splitlines()
        if end.code != 0:
            self.adb.read("true", "adb")  # a phone that restarts ends its shell with any code
            said = "; ".join(line.strip() for line in lines[2:] if line.strip())[-300:] or "no output"
            if _SIGNALLED < end.code <= _SIGNALLED + _MAX_SIGNAL:
                raise EndedOnPhoneError(_signal(end.code - _SIGNALLED), said)
            got, fix = f"exit code {end.code}: {said}", "Look at: adb logcat"
            raise EngineError(f"{NET_RUN} on the phone", got=got, expected="results", fix=fix)
        began, ended = [*lines, "", ""][:2]
        if not began.isdecimal() or not ended.isdecimal():
            raise EngineError("date", got=repr(began[:20]), expected="nanoseconds", fix="Use Android 8 or newer.")
        return (int(ended) - int(began)) / 1e9


def _signal(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _read(folder: Path, results: Arrays) -> dict[str, NDArray[Any]]:
    """The outputs of a run; their files are named after them, with other characters for some."""
    files = {_plain(path.stem.removesuffix(_NATIVE)): path for path in sorted(folder.glob("*.raw"))}
    arrays = dict[str, NDArray[Any]]()
    for name, like in results.items():
        if (path := files.get(_plain(name))) is None:
            got = ", ".join(sorted(files)) or "no results"
            raise EngineError(f"{NET_RUN} on the phone", got=got, expected=name, fix="Make the kit again.")
        content = path.read_bytes()
        fits = len(content) == like.nbytes
        values = np.frombuffer(content, like.dtype if fits else np.uint8)
        arrays[name] = values.reshape(like.shape) if fits else values
    return arrays


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name)
