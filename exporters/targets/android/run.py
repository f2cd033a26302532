"""A run of Genie on a phone: Qualcomm's files, the command, its answer and its profile."""

from __future__ import annotations

import codecs
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from posixpath import dirname
from shlex import quote
from typing import Any

import msgspec

from edgekv.errors import EdgeKVError, EngineError, UsageError
from edgekv.machine.decoding import DECODERS
from edgekv.machine.scratch import scratch_folder
from edgekv.qnn.vendor_libraries import LIBRARIES, SDK_VARIABLES, Platform, skel, stated_version
from exporters.inspect.trace import write_trace
from exporters.targets.android.adb import Adb
from exporters.targets.genie.config import Debug, GenieConfig
from exporters.targets.genie.folder import GenieFolder
from exporters.targets.genie.proof import read_dump

RUNNER, APP = "genie-t2t-run", "genie-app"

_ON = Platform("android", "arm64")
_FOLDERS = ("lib/aarch64-android", "lib/hexagon-v{arch}/unsigned", "bin/aarch64-android", "jni/arm64-v8a", ".")
_NEEDED = (*LIBRARIES, "QnnHtpNetRunExtensions")

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Qairt:
    """The files that a program of Qualcomm's needs on a phone.

    Attributes:
        version: of the libraries, such as (2, 51, 0); empty if none of them says it.
        libraries: for Android's processor, and the runners.
        skel: for the HTP, which loads it by ADSP_LIBRARY_PATH.
    """

    version: Version
    libraries: tuple[Path, ...]
    skel: Path

    @property
    def files(self) -> dict[str, Path]:
        """Everything by its place on the phone."""
        return {path.name: path for path in self.libraries} | {f"dsp/{self.skel.name}": self.skel}


def find_qairt(sources: Sequence[Path], arch: int, runner: str, scratch: Path) -> Qairt:
    """Find everything that one version of the HTP needs.

    Args:
        sources: folders of the SDK or of unpacked archives, or `.aar` files; empty for the SDK of the environment.
        arch: HTP version of the phone.
        runner: the program to run.
        scratch: receives what is in archives.

    Raises:
        UsageError: no source is given, or one is neither a folder nor an archive.
        EngineError: a file is missing, or the libraries are of two versions.
    """
    places = sources or [Path(os.environ[name]) for name in SDK_VARIABLES if os.environ.get(name)][:1]
    if not places:
        fix = f"Download the Qualcomm AI Runtime SDK, and give its folder: --qairt DIR (or set {SDK_VARIABLES[0]})"
        raise UsageError("--qairt", got="none", expected="Qualcomm's libraries for Android", fix=fix)
    roots = [_opened(source, scratch) for source in places]
    names = [*map(_ON.library, _NEEDED), _ON.stub(arch), runner, skel(arch)]
    places_of = {name: _first(roots, name, arch) for name in names}
    if missing := [name for name, path in places_of.items() if path is None]:
        raise EngineError(
            "--qairt",
            got=f"no {', '.join(missing)} in {', '.join(map(str, places))}",
            expected=f"the files that HTP V{arch} needs on Android",
            fix="Give the SDK's root, which has bin/, lib/ and lib/hexagon-vN. Archives for apps have no programs.",
        )
    paths = {name: path for name, path in places_of.items() if path is not None}
    versions = {name: version for name, path in paths.items() if (version := _version(path))}
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"{name} {format_version(version)}" for name, version in sorted(versions.items()))
        raise EngineError("--qairt", got=listed, expected="libraries of one version", fix="Give one SDK.")
    on_htp = paths.pop(skel(arch))
    others = (_first(roots, name, arch) for name in (RUNNER, APP) if name != runner)  # another model may need these
    libraries = (*paths.values(), *(path for path in others if path is not None))
    return Qairt(next(iter(versions.values()), ()), libraries, on_htp)


def check_version(qairt: Qairt, binaries: Iterable[Path]) -> None:
    """Check that the libraries load what a newer or the same compiler wrote.

    Raises:
        EngineError: a binary was compiled by a newer version than the libraries are.
    """
    for binary in binaries:
        version = _version(binary)
        if qairt.version and version and version > qairt.version:
            raise EngineError(
                binary.name,
                got=f"compiled by QAIRT {format_version(version)}",
                expected=f"at most the {format_version(qairt.version)} of the libraries",
                fix=f"Give an SDK of {format_version(version)} or newer: --qairt DIR",
            )


def format_version(version: Version) -> str:
    return ".".join(map(str, version))


def _version(path: Path) -> Version:
    """Empty if the file does not say it."""
    text = stated_version(path)
    return () if text is None else tuple(map(int, text.split(".")))


def _opened(source: Path, scratch: Path) -> Path:
    """The folder itself, or one with the libraries of an archive."""
    if source.is_dir():
        return source
    folder = scratch / source.name
    try:
        with zipfile.ZipFile(source) as archive:
            members = [name for name in archive.namelist() if re.fullmatch(r"jni/arm64-v8a/[\w.+-]+\.so", name)]
            archive.extractall(folder, members)
    except (OSError, zipfile.BadZipFile) as error:
        got = "no such file" if isinstance(error, FileNotFoundError) else "no archive"
        fix = "Give the SDK's folder, or an AAR that holds jni/arm64-v8a."
        raise UsageError("--qairt", got=f"{source} ({got})", expected="a folder or an .aar file", fix=fix) from None
    return folder


def _first(roots: Sequence[Path], name: str, arch: int) -> Path | None:
    paths = (root / folder.format(arch=arch) / name for root in roots for folder in _FOLDERS)
    return next((path for path in paths if path.is_file()), None)


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
