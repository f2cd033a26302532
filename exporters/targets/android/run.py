"""A run of Genie on a phone: the command, its answer and its profile."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from posixpath import dirname
from shlex import quote
from typing import Any

import msgspec

from edgekv.errors import EdgeKVError, EngineError
from edgekv.machine.decoding import DECODERS
from edgekv.machine.scratch import scratch_folder
from exporters.inspect.trace import write_trace
from exporters.targets.android.adb import Adb
from exporters.targets.android.push import APP, RUNNER, OnPhone, runner_of
from exporters.targets.genie.config import Debug, GenieConfig
from exporters.targets.genie.folder import GenieFolder
from exporters.targets.genie.proof import read_dump

_BEGIN, _END = "[BEGIN]:", "[END]"


class AnswerReader:
    """Finds the answer in a stream of bytes, as they come.

    Attributes:
        ended: whether the end of the answer was seen.
    """

    def __init__(self) -> None:
        self.ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False
        self._waiting = ""

    def read(self, chunk: bytes) -> str:
        """The next text of the answer. What could be the begin of the mark at its end is held back."""
        self._waiting += self._decoder.decode(chunk)
        if not self._begun:
            _, _, rest = self._waiting.partition(_BEGIN)
            if not rest:
                return ""
            self._begun, self._waiting = True, rest.removeprefix(" ")
        if self.ended:
            return ""
        text, mark, _ = self._waiting.partition(_END)
        if mark:
            self.ended = True
            return text
        held = next((n for n in range(len(_END) - 1, 0, -1) if text.endswith(_END[:n])), 0)
        self._waiting = text[len(text) - held :]
        return text[: len(text) - held]


class GenieSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What Genie measured in a query.

    Attributes:
        load_ms: time to create the dialog, ms.
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens of the answer.
        first_token_ms: time to the first token, ms.
        prompt_tokens_per_s: speed of prefill.
        new_tokens_per_s: speed of decode.
    """

    load_ms: float
    prompt_tokens: int
    new_tokens: int
    first_token_ms: float
    prompt_tokens_per_s: float
    new_tokens_per_s: float


class _Component(msgspec.Struct, frozen=True):
    events: list[dict[str, Any]] = []


class _Profile(msgspec.Struct, frozen=True):
    components: list[_Component]


_IN_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "ns": 1e-6}


def read_profile(content: bytes) -> GenieSpeed:
    """The last query of a profile.

    Raises:
        EngineError: it is no profile of Genie, or has no query.
    """
    fix = "Check the version of Genie on the phone."
    try:
        profile = DECODERS[_Profile].decode(content)
        events = {event["type"]: event for component in profile.components for event in component.events}
        created, query = events["GenieDialog_create"], events["GenieDialog_query"]
        return GenieSpeed(
            load_ms=_ms(created["init-time"]),
            prompt_tokens=int(query["num-prompt-tokens"]["value"]),
            new_tokens=int(query["num-generated-tokens"]["value"]),
            first_token_ms=_ms(query["time-to-first-token"]),
            prompt_tokens_per_s=float(query["prompt-processing-rate"]["value"]),
            new_tokens_per_s=float(query["token-generation-rate"]["value"]),
        )
    except msgspec.MsgspecError as error:
        raise EngineError("Genie's profile", got=str(error), expected="its JSON", fix=fix) from None
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError("Genie's profile", got=f"no {error}", expected="a query", fix=fix) from None


def _ms(metric: dict[str, Any]) -> float:
    return float(metric["value"]) * _IN_MS[metric["unit"]]


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
    with scratch_folder("phone") as here, folder_there(adb, dirname(place.folder)) as there:
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
    config = DECODERS[GenieConfig].decode((folder.path / name).read_bytes())
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
        f"cd {quote(place.folder)} && echo $$ > {there}/pid && export {search_paths(place.libraries)} && "
        f"exec {quote(f'{place.libraries}/{program}')} {arguments}"
    )


def search_paths(libraries: str) -> str:
    """Where Qualcomm's programs find a folder of libraries, whose skel is in its folder `dsp`."""
    return f"LD_LIBRARY_PATH={quote(libraries)} ADSP_LIBRARY_PATH={quote(f'{libraries}/dsp;{_VENDOR_DSP}')}"


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
    got, fix = f"exit code {code}", "Run edgekv push again, and look at: adb logcat"
    for mark, (meaning, fix_of_it) in _MEANINGS.items():
        if mark in said:
            got, fix = meaning, fix_of_it
    lines = [line.strip() for line in said.splitlines() if line.strip()][-3:]
    raise EngineError(
        "Genie on the phone", got=f"{got}: {'; '.join(lines) or 'no output'}", expected="an answer", fix=fix
    )


@contextmanager
def folder_there(adb: Adb, within: str) -> Iterator[str]:
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
