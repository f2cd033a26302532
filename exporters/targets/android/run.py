"""Genie on a phone: a prompt there, the answer back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from posixpath import dirname
from shlex import quote

import msgspec

from edgekv.errors import EdgeKVError, EngineError
from edgekv.machine.scratch import scratch_folder
from exporters.inspect.trace import write_trace
from exporters.targets.android.adb import Adb
from exporters.targets.android.answer import AnswerReader
from exporters.targets.android.profile import GenieSpeed, read_profile
from exporters.targets.android.qairt import APP, RUNNER
from exporters.targets.genie.config import Debug, GenieConfig
from exporters.targets.genie.dump import read_dump
from exporters.targets.genie.folder import GenieFolder

_PROMPT, _CONFIG, _PROFILE, _ANSWER, _SCRIPT, _DUMP = (
    "prompt.txt", "config.json", "profile.json", "answer.txt", "script.txt", "dump",
)  # fmt: skip
_TAIL_BYTES = 1 << 12
_VENDOR_DSP = "/vendor/dsp/cdsp;/vendor/lib/rfsa/adsp;/system/lib/rfsa/adsp;/dsp"
_MEANINGS = {
    "14001": ("no HTP with these libraries", "Check that the SDK has the skel of this HTP, and push again."),
    "CANNOT LINK": ("a library that is missing", "Push again with the SDK's root: --qairt DIR"),
    "Context Size was exceeded": ("a prompt beyond the context", "Use a shorter prompt."),
}


@dataclass(frozen=True, slots=True)
class OnPhone:
    """Where a folder of Genie's and its libraries are on a phone.

    Attributes:
        folder: the folder that `edgekv bundle genie` wrote.
        libraries: the libraries and runners; the skel is in its folder `dsp`.
        config: name of the configuration.
    """

    folder: str
    libraries: str
    config: str


def runner_of(folder: GenieFolder) -> str:
    """The program that runs a folder: genie-t2t-run restores no state, genie-app does."""
    return RUNNER if folder.manifest.sink is None else APP


def run_on_phone(
    adb: Adb,
    place: OnPhone,
    folder: GenieFolder,
    prompt: str,
    take: Callable[[str], None],
    *,
    max_new_tokens: int | None = None,
    trace: Path | None = None,
) -> GenieSpeed:
    """Continue a prompt in Genie on the phone. What it writes there is removed again.

    Args:
        adb: the phone.
        place: where everything is.
        folder: the same folder here.
        prompt: the text to continue.
        take: called with pieces of the answer: as they come, or at the end if genie-app runs.
        max_new_tokens: the longest answer; None for the configuration's.
        trace: a file that receives keys, values and logits of the prompt's first tokens, for `edgekv diff`.

    Raises:
        EngineError: Genie failed, or the phone was lost.
        UsageError: the trace cannot be written.
    """
    with scratch_folder("phone") as here, _folder_there(adb, dirname(place.folder)) as there:
        config = _config(folder, place.config, max_new_tokens, None if trace is None else f"{there}/{_DUMP}")
        for name, content in (
            (_PROMPT, prompt.encode()),
            (_CONFIG, msgspec.json.encode(config)),
            (_SCRIPT, _script(folder, there).encode()),
        ):
            (here / name).write_bytes(content)
            adb.push(here / name, f"{there}/{name}")
        program = runner_of(folder)
        _run(adb, _command(place, there, program), take, streams=program == RUNNER)
        adb.pull(f"{there}/{_PROFILE}", here / _PROFILE)
        if program == APP:
            adb.pull(f"{there}/{_ANSWER}", here / _ANSWER)
            take((here / _ANSWER).read_text("utf-8", "replace"))
        if trace is not None:
            adb.pull(f"{there}/{_DUMP}", here / _DUMP)
            write_trace(read_dump(here / _DUMP), trace)
        return read_profile((here / _PROFILE).read_bytes())


def _config(folder: GenieFolder, name: str, max_new_tokens: int | None, dump: str | None) -> GenieConfig:
    config = msgspec.json.decode((folder.path / name).read_bytes(), type=GenieConfig)
    dialog = config.dialog
    if max_new_tokens is not None:
        dialog = msgspec.structs.replace(dialog, max_num_tokens=max_new_tokens)
    if dump is not None:
        dialog = msgspec.structs.replace(dialog, debug=Debug(path=dump, dump_tensors=True, dump_specs=True))
    return GenieConfig(dialog=dialog)


def _script(folder: GenieFolder, there: str) -> str:
    """What genie-app does: https://docs.qualcomm.com/doc/80-63442-100/topic/genie-app.html"""
    sink = folder.manifest.sink
    return "\n".join(
        [
            "profile create profile1",
            f"dialog config create config1 {there}/{_CONFIG}",
            "dialog config bind profile config1 profile1",
            "dialog create dialog1 config1",
            *([] if sink is None else [f"dialog restore dialog1 {sink.state}"]),
            f"dialog query dialog1 {there}/{_PROMPT} {there}/{_ANSWER}",
            f"profile save profile1 {there}/{_PROFILE}",
            "dialog free dialog1",
            "dialog config free config1",
            "profile free profile1",
            "exit",
            "",
        ]
    )


def _command(place: OnPhone, there: str, program: str) -> str:
    """Its number is kept, so that it can be ended. Paths in a configuration are relative to the working directory."""
    arguments = {
        RUNNER: f"-c {there}/{_CONFIG} --prompt_file {there}/{_PROMPT} --profile {there}/{_PROFILE}",
        APP: f"-s {there}/{_SCRIPT}",
    }[program]
    return (
        f"cd {quote(place.folder)} && echo $$ > {there}/pid && "
        f"export LD_LIBRARY_PATH={quote(place.libraries)} "
        f"ADSP_LIBRARY_PATH={quote(f'{place.libraries}/dsp;{_VENDOR_DSP}')} && "
        f"exec {quote(f'{place.libraries}/{program}')} {arguments}"
    )


def _run(adb: Adb, command: str, take: Callable[[str], None], *, streams: bool) -> None:
    answer, tail = AnswerReader(), b""
    with adb.stream(command) as running:
        for chunk in running.chunks():
            tail = (tail + chunk)[-_TAIL_BYTES:]
            text = answer.read(chunk)
            if text and streams:
                take(text)
        code = running.code()
    if code == 0 and (answer.ended or not streams):
        return
    said = tail.decode("utf-8", "replace")
    adb.check_alive(code, said)
    found, fix = f"exit code {code}", "Run edgekv push again, and look at: adb logcat"
    for mark, (meaning, fix_of_it) in _MEANINGS.items():
        if mark in said:
            found, fix = meaning, fix_of_it
    lines = [line.strip() for line in said.splitlines() if line.strip()][-3:]
    raise EngineError(
        "Genie on the phone", got=f"{found}: {'; '.join(lines) or 'no output'}", expected="an answer", fix=fix
    )


@contextmanager
def _folder_there(adb: Adb, within: str) -> Iterator[str]:
    """A folder of the phone for one run. What still runs from it is ended, and the folder removed."""
    folder = adb.read(f"mktemp -d {quote(f'{within}/run.XXXXXX')} 2>/dev/null", "mktemp").strip()
    if re.fullmatch(rf"{re.escape(within)}/run\.\w+", folder) is None:  # it is removed later: nothing else may be
        raise EngineError("mktemp", got=repr(folder)[:80], expected=f"a folder {within}/run.XXXXXX", fix="Push again.")
    try:
        yield folder
    except BaseException:
        with suppress(EdgeKVError):  # the phone may be lost; the caller gets the first error
            adb.shell(f"kill $(cat {quote(f'{folder}/pid')} 2>/dev/null) 2>/dev/null")
        raise
    finally:
        with suppress(EdgeKVError):
            adb.shell(f"rm -rf {quote(folder)}")
