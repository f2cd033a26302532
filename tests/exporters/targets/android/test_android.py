"""Pushing to a phone and running there, over a stand-in for adb; Genie itself is libGenie.so of this machine."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from edgekv.bundle import FileRecord
from edgekv.cli import run
from edgekv.qnn.vendor_libraries import stated_version
from exporters.inspect.trace import read_trace
from exporters.targets.android import adb
from exporters.targets.android.run import AnswerReader
from exporters.targets.genie.config import (
    CONFIG,
    SHARED_CONFIG,
    Backend,
    Binaries,
    Context,
    Dialog,
    Engine,
    GenieConfig,
    ModelFiles,
    PositionalEncoding,
    QnnHtp,
    Sampler,
    TokenizerFile,
)
from exporters.targets.genie.dialog import GenieDialog, find_library
from exporters.targets.genie.folder import GENIE_MANIFEST, GenieFolder, GenieGraph, GenieManifest
from tests.support.exports import ROOT
from tests.support.phones import PROPERTIES, VERSION, Phone, write_sdk

BINARY = f"v{VERSION}.260929181845".encode()
PROFILE = {
    "header": {"artifact_type": "GENIE_PROFILE"},
    "components": [
        {
            "name": "dialog0",
            "events": [
                {"type": "GenieDialog_create", "init-time": {"value": 98426, "unit": "us"}},
                {
                    "type": "GenieDialog_query",
                    "num-prompt-tokens": {"value": 4, "unit": ""},
                    "prompt-processing-rate": {"value": 400.5, "unit": "toks/sec"},
                    "time-to-first-token": {"value": 10500, "unit": "us"},
                    "num-generated-tokens": {"value": 12, "unit": ""},
                    "token-generation-rate": {"value": 25.25, "unit": "toks/sec"},
                },
            ],
        }
    ],
}
ANSWERS = f"""
test "$ADSP_LIBRARY_PATH" = "${{ADSP_LIBRARY_PATH#$LD_LIBRARY_PATH/dsp;}}" && exit 9
while [ $# -gt 1 ]; do case $1 in -c) config=$2;; --prompt_file) prompt=$2;; --profile) profile=$2;; esac; shift 2; done
test -f tokenizer.json || exit 8
echo "Using libGenie.so version 1.21.0"
printf '[PROMPT]: %s\\n\\n[BEGIN]: ' "$(cat $prompt)"
printf 'Grüße an %s' "$(cat $prompt)"
grep -o 'max-num-tokens[^,]*' $config
printf '[END]\\n'
cat > $profile <<'JSON'
{json.dumps(PROFILE)}
JSON
"""


CONTENT = GenieConfig(
    dialog=Dialog(
        max_num_tokens=20,
        context=Context(size=64, n_vocab=320, bos_token=-1, eos_token=[257], pad_token=0),
        sampler=Sampler(seed=0, temp=1.0, top_k=1, top_p=1.0, greedy=True),
        tokenizer=TokenizerFile(path="tokenizer.json"),
        engine=Engine(
            backend=Backend(qnn_htp=QnnHtp(kv_dim=16)),
            model=ModelFiles(
                binary=Binaries(ctx_bins=["shared_qnn.bin"]),
                positional_encoding=PositionalEncoding(rope_dim=8, rope_theta=1e4),
            ),
        ),
    )
)


@pytest.fixture
def phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Phone:
    return Phone(tmp_path / "phone", monkeypatch)


@pytest.fixture
def sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_sdk(tmp_path / "sdk", ANSWERS)
    monkeypatch.setenv("QAIRT_SDK_ROOT", str(folder))
    return folder


@pytest.fixture
def genie(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "my model")


def write_folder(path: Path, binary: bytes = BINARY, soc: str = "SM8650") -> Path:
    """What `edgekv bundle genie` writes, with binaries that nothing loads."""
    config = msgspec.json.encode(CONTENT)
    contents = {
        "token_qnn.bin": binary + b"1",
        "prompt_qnn.bin": binary + b"2",
        "shared_qnn.bin": binary,
        CONFIG: config,
        SHARED_CONFIG: config,
        "tokenizer.json": b"{}",
        "htp_backend_ext_config.json": b"{}",
    }
    path.mkdir()
    for name, content in contents.items():
        (path / name).write_bytes(content)
    manifest = GenieManifest(
        producer="edgekv",
        soc=soc,
        arch=75,
        compiler="onnxruntime-qnn 2.7.0",
        bundle_sha256="0",
        context=64,
        graphs=[
            GenieGraph(name="token", file="token_qnn.bin", part=0, ar=1, context=64),
            GenieGraph(name="prompt", file="prompt_qnn.bin", part=0, ar=16, context=64),
        ],
        shared=["shared_qnn.bin"],
        checked=False,
        floating_nodes=[],
        files={name: FileRecord(bytes=len(each), sha256=sha256(each).hexdigest()) for name, each in contents.items()},
    )
    (path / GENIE_MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return path


LIBRARIES = "edgekv/qairt-2.51.0-v75"
PUSHED = {
    *(f"edgekv/my_model/{name}" for name in (GENIE_MANIFEST, SHARED_CONFIG, "shared_qnn.bin", "tokenizer.json")),
    "edgekv/my_model/htp_backend_ext_config.json",
    *(f"{LIBRARIES}/lib{name}.so" for name in ("Genie", "QnnSystem", "QnnHtp", "QnnHtpNetRunExtensions")),
    f"{LIBRARIES}/libQnnHtpV75Stub.so",
    f"{LIBRARIES}/dsp/libQnnHtpV75Skel.so",
    f"{LIBRARIES}/genie-t2t-run",
    f"{LIBRARIES}/genie-app",
    "edgekv/my_model/.edgekv-push",
    f"{LIBRARIES}/.edgekv-push",
}
MARKERS = {name for name in PUSHED if name.endswith(".edgekv-push")}


def test_a_push_copies_what_the_phone_needs_and_no_binary_of_single_graphs(
    phone: Phone, sdk: Path, genie: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["push", str(genie)]) == 0
    assert phone.files() == PUSHED
    printed = capsys.readouterr().out
    assert "SM-S928B, SM8650, Android 15: /data/local/tmp/edgekv/my_model" in printed
    assert f"next: edgekv run '{genie}' --on adb --prompt " in printed


def test_a_second_push_copies_what_changed_and_removes_the_rest(
    phone: Phone, sdk: Path, genie: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["push", str(genie)]) == 0
    folder = phone.storage / "edgekv/my_model"
    (folder / "old_qnn.bin").touch()
    with (folder / ".edgekv-push").open("a") as marker:
        marker.write("old_qnn.bin\n../../victim\n")  # as an earlier push of another export did
    (phone.storage / "victim").touch()
    (folder / "notes.txt").write_text("the user's own")
    (folder / "tokenizer.json").write_text("damaged")
    phone.set()
    capsys.readouterr()
    assert run(["push", str(genie), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["files"]["copied"] == ["/data/local/tmp/edgekv/my_model/tokenizer.json"]
    assert done["files"]["removed"] == ["/data/local/tmp/edgekv/my_model/old_qnn.bin"]
    assert (len(done["files"]["kept"]), len(done["libraries"]["kept"]), phone.pushes) == (4, 8, 1)
    assert phone.files() == PUSHED | {"edgekv/my_model/notes.txt", "victim"}


def test_files_of_a_folder_that_no_push_wrote_stay(phone: Phone, sdk: Path, genie: Path) -> None:
    folder = phone.storage / "mine"
    folder.mkdir()
    (folder / "photo.jpg").write_text("the user's own")
    assert run(["push", str(genie), "--to", "/data/local/tmp/mine"]) == 0
    assert run(["push", str(genie), "--to", "/data/local/tmp/mine"]) == 0
    assert (folder / "photo.jpg").read_text() == "the user's own"


def test_a_folder_of_a_run_that_is_not_named_as_expected_is_not_removed(
    phone: Phone, sdk: Path, genie: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = phone.storage.parent / "noisy"
    tools.mkdir()
    (tools / "mktemp").write_text(f"#!/bin/sh\necho 'linker: a warning'\necho {phone.storage}\n")
    (tools / "mktemp").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert run(["run", str(genie), "--on", "adb", "--prompt", "x"]) == 1
    message = capsys.readouterr().err
    assert "mktemp: got" in message and "linker: a warning" in message and "run.XXXXXX" in message
    assert phone.files() == PUSHED


def test_a_lost_phone_has_no_damaged_file_and_the_next_push_continues(
    phone: Phone, sdk: Path, genie: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phone.set(lost_after=9)
    assert run(["push", str(genie)]) == 1
    message = capsys.readouterr().err
    assert "adb: R5CX: got error: device offline" in message and "Reconnect it and run the command again" in message
    there = phone.files()
    complete = {name for name in there if not name.endswith(".part")}
    assert complete < PUSHED and len(there - complete) == 1
    phone.set(lost_after=None)
    assert run(["push", str(genie)]) == 0
    assert phone.files() == PUSHED and phone.pushes == len(PUSHED - MARKERS) - len(complete - MARKERS)


def test_an_answer_comes_with_its_speed(
    phone: Phone, sdk: Path, genie: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(genie), "--on", "adb", "--prompt", "it's $HOME", "--max-new-tokens", "7"]
    assert run(command) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Grüße an it's $HOMEmax-num-tokens\":7")
    assert "4 + 12 tokens; loaded in 98 ms, first token 10 ms, prefill 400.5 tokens/s, decode 25.2" in printed.err
    assert phone.files() == PUSHED, "what a run wrote is removed"
    assert run([*command, "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)["stats"]
    assert (stats["prompt_tokens"], stats["new_tokens"], stats["new_tokens_per_s"]) == (4, 12, 25.25)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "echo 'Failed to create device: 14001'; exit 1",
            "no HTP with these libraries: Failed to create device: 14001",
        ),
        pytest.param("exit 3", "got exit code 3: no output; expected an answer", marks=pytest.mark.thorough),
        pytest.param("echo '[BEGIN]: half of'", "got exit code 0", marks=pytest.mark.thorough),
        ("kill -SEGV $$", "expected an answer"),
    ],
)
def test_what_genie_says_is_in_the_error(
    phone: Phone, sdk: Path, genie: Path, capsys: pytest.CaptureFixture[str], program: str, message: str
) -> None:
    (sdk / "bin/aarch64-android/genie-t2t-run").write_text(f"#!/bin/sh\n{program}\n")
    assert run(["run", str(genie), "--on", "adb", "--prompt", "x"]) == 1
    assert message in capsys.readouterr().err
    assert phone.files() == PUSHED


def test_a_phone_that_is_lost_while_it_answers(
    phone: Phone, sdk: Path, genie: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lose = "echo '[BEGIN]: so'; touch $ADB_PHONE/lost; echo 'error: device offline'; exit 1"
    (sdk / "bin/aarch64-android/genie-t2t-run").write_text(f"#!/bin/sh\n{lose}\n")
    assert run(["run", str(genie), "--on", "adb", "--prompt", "x"]) == 1
    assert "adb: R5CX: got error: device offline; expected a connected phone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"states": {}}, "adb: got no device; expected a phone"),
        ({"states": {"R5CX": "unauthorized"}}, "got unauthorized; expected a device that accepts commands. Unlock"),
        ({"states": {"R5CX": "offline"}}, "got offline; expected a device that accepts commands. Reconnect"),
        ({"states": {"R5CX": "no permissions (user in plugdev group); see [http]"}}, "udev rules"),
        ({"states": {"A": "device", "B": "device"}}, "--serial: got none; expected one of A, B"),
        ({"properties": PROPERTIES | {"ro.soc.model": "SM8550"}}, "got binaries for SM8650 (HTP V75); "
         "expected binaries for the phone's SM8550 (HTP V73). Export and compile for it: --device SM8550"),
        ({"properties": PROPERTIES | {"ro.soc.model": "MT6989"}}, "got MT6989; expected a chip that edgekv knows"),
        ({"properties": PROPERTIES | {"ro.soc.model": ""}}, "Say which it is: --chip SM8650"),
        ({"properties": PROPERTIES | {"ro.product.cpu.abi": "x86_64"}}, "got x86_64; expected arm64-v8a"),
        ({"free_kib": 1024}, "got 1.0 MB free; expected 16.8 MB"),
    ],
)  # fmt: skip
def test_phones_that_cannot_take_it_are_named_before_anything_is_copied(
    phone: Phone, sdk: Path, genie: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, object], message: str
) -> None:
    phone.set(**settings)
    assert run(["push", str(genie)]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not phone.files() and phone.pushes == 0


def test_chips_are_known_by_more_than_one_name(phone: Phone, sdk: Path, genie: Path) -> None:
    phone.set(properties=PROPERTIES | {"ro.soc.model": "SM8650-AC"})
    assert run(["push", str(genie)]) == 0
    phone.set(properties=PROPERTIES | {"ro.soc.model": ""})
    assert run(["push", str(genie), "--chip", "Snapdragon 8 Gen 3"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "/sdcard/edgekv"], "--to: got /sdcard/edgekv; expected storage from which programs may start"),
        (["--to", "tmp"], "--to: got 'tmp'; expected an absolute path"),
        (["--to", "/data/$(reboot)"], "expected an absolute path of letters"),
        (["--to", "/data/local/tmp/../../x"], "expected an absolute path"),
        (["--serial", "other"], "--serial: got other; expected one of R5CX"),
        (["--qairt", "/nowhere"], "--qairt: got /nowhere (no such file); expected a folder or an .aar file"),
        (["--chip", "potato"], "chip: got potato"),
    ],
)
def test_wrong_options_are_named_before_anything_is_copied(
    phone: Phone, sdk: Path, genie: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(["push", str(genie), *arguments]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not phone.files()


def test_libraries_must_be_whole_of_one_version_and_not_older(
    phone: Phone, genie: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QAIRT_SDK_ROOT", raising=False)
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    sdks = {
        "other HTP": (write_sdk(tmp_path / "v73", ANSWERS, arch=73), "no libQnnHtpV75Stub.so, libQnnHtpV75Skel.so in"),
        "mixed": (write_sdk(tmp_path / "m", ANSWERS, QnnHtpV75Skel="2.44.0"), "libQnnHtpV75Skel.so 2.44.0"),
        "older": (write_sdk(tmp_path / "o", ANSWERS, version="2.45.1"), "QAIRT 2.51.0; expected at most the 2.45.1"),
    }  # fmt: skip
    assert run(["push", str(genie)]) == 2
    assert "--qairt: got none; expected Qualcomm's libraries for Android" in capsys.readouterr().err
    for sdk, message in sdks.values():
        assert run(["push", str(genie), "--qairt", str(sdk)]) == 1
        assert message in capsys.readouterr().err
    assert not phone.files()
    newer = write_sdk(tmp_path / "n", ANSWERS, version="2.52.0")
    assert run(["push", str(genie), "--qairt", str(newer)]) == 0


def test_libraries_come_from_archives_too(phone: Phone, sdk: Path, genie: Path, tmp_path: Path) -> None:
    archive, rest = tmp_path / "qnn-runtime.aar", tmp_path / "rest"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sdk.rglob("libQnn*.so"):
            file.write(path, f"jni/arm64-v8a/{path.name}")
        file.writestr("jni/arm64-v8a/../../../escaped.so", "")
    rest.mkdir()
    for name in (
        "lib/aarch64-android/libGenie.so",
        *(f"bin/aarch64-android/genie-{each}" for each in ("t2t-run", "app")),
    ):
        (sdk / name).rename(rest / Path(name).name)
    assert run(["push", str(genie), "--qairt", str(archive), "--qairt", str(rest)]) == 0
    assert phone.files() == PUSHED


def test_a_full_phone_keeps_what_is_complete(
    phone: Phone, sdk: Path, genie: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phone.set(full_after=3)
    assert run(["push", str(genie)]) == 1
    assert "got no space left; expected room for the file" in capsys.readouterr().err
    assert len(phone.files() - MARKERS) == 3


def test_other_folders_are_refused_by_what_they_are(
    phone: Phone, sdk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["push", str(ROOT / "models/stdlib-4m")]) == 1
    assert "edgekv export" in capsys.readouterr().err
    damaged = write_folder(tmp_path / "damaged")
    (damaged / "tokenizer.json").write_text("other")
    assert run(["push", str(damaged)]) == 1
    assert "tokenizer.json: got sha256" in capsys.readouterr().err
    assert not phone.files()


def test_without_adb_the_way_out_is_named(
    genie: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ANDROID_HOME", "ANDROID_SDK_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["push", str(genie)]) == 1
    assert "adb: got no program adb; expected Android's platform tools. Install" in capsys.readouterr().err


def test_an_adb_that_never_lists_its_phones_is_ended(
    phone: Phone, sdk: Path, genie: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its server hangs, which says nothing and never ends."""
    client = phone.folder / "tools/platform-tools/adb"
    client.write_text("#!/bin/sh\nexec sleep 300\n")
    monkeypatch.setattr(adb, "_LISTING_S", 0.5)
    assert run(["push", str(genie)]) == 1
    assert "adb: got no answer within 0.5 s; expected an answer. Run: adb kill-server." in capsys.readouterr().err
    assert not phone.files()


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_an_answer_is_read_in_any_pieces(step: int) -> None:
    content = "log\n[PROMPT]: a\n\n[BEGIN]: grün [EN [END]\nKPIS".encode()
    reader = AnswerReader()
    text = "".join(reader.read(content[at : at + step]) for at in range(0, len(content), step))
    assert (text, reader.ended) == ("grün [EN ", True)


@pytest.mark.htp
def test_binaries_and_libraries_state_their_version(genie_folder: GenieFolder) -> None:
    (shared,) = genie_folder.manifest.shared
    assert (
        stated_version(genie_folder.path / shared) == stated_version(find_library().parent / "libQnnHtp.so") is not None
    )


@pytest.mark.thorough
@pytest.mark.htp
@pytest.mark.parametrize("sink", [False, True])
def test_genie_answers_there_as_here(
    genie_folder: GenieFolder,
    sinking_genie_folder: GenieFolder,
    wide_columns: Path,
    phone: Phone,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sink: bool,
) -> None:
    """With genie-t2t-run, and with genie-app to restore a state; speed and trace are Genie's own."""
    folder = sinking_genie_folder if sink else genie_folder
    sdk = write_sdk(tmp_path / "sdk", "")
    for name in ("genie-t2t-run", "genie-app"):
        program = f"#!{sys.executable}\n" + (ROOT / "tests/support/phone_programs.py").read_text()
        (sdk / "bin/aarch64-android" / name).write_text(program)
    monkeypatch.setenv("QAIRT_SDK_ROOT", str(sdk))
    settings = {"library": str(find_library()), "folder": str(folder.path)}
    (phone.folder / "emulator.json").write_text(json.dumps(settings))
    command = ["run", str(folder.path), "--on", "adb", "--prompt", "import os", "--max-new-tokens", "5", "--json"]
    there, here = tmp_path / "there.npz", tmp_path / "here.npz"
    assert run([*command, "--trace", str(there)]) == 0
    found = json.loads(capsys.readouterr().out)
    with GenieDialog(folder.path, folder.config(), folder.state) as dialog:
        assert found["text"] == "".join(dialog.query("import os", 5))
    assert sink or found["text"]
    assert found["stats"]["new_tokens"] == 5 and found["stats"]["first_token_ms"] > 0
    if sink:
        return
    (tmp_path / "text.txt").write_text("import os" * 2)
    options = ["--text", str(tmp_path / "text.txt"), "--tokens", "10", "--engine", "htp"]
    assert run(["trace", str(wide_columns), "-o", str(here), *options]) == 0
    assert len(read_trace(there)["logits"]) == 10
    assert run(["diff", str(here), str(there), "--limit-db", "60"]) == 0
    assert "no difference: all 5 results agree" in capsys.readouterr().out


def test_a_run_writes_below_the_folder_that_was_named(
    phone: Phone, sdk: Path, genie: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sdk / "bin/aarch64-android/genie-t2t-run").write_text("#!/bin/sh\n" + ANSWERS.replace("$(cat $prompt)", "$prompt"))
    command = ["run", str(genie), "--on", "adb", "--prompt", "x", "--to", "/data/local/tmp/other"]
    assert run(command) == 0
    assert "Grüße an /data/local/tmp/other/run." in capsys.readouterr().out
    assert {name.split("/")[0] for name in phone.files()} == {"other"}
