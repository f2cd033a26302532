from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from devices import find
from edgekv.cli import run
from edgekv.cli.commands import find_commands
from edgekv.cli.exit_codes import exit_code_of
from edgekv.errors import BundleError, UsageError
from tests.support.processes import interruptible

PROMPT = "import os\n"


def _raising(error: BaseException) -> int:
    def call() -> None:
        raise error

    return exit_code_of(call)


def _last_line(capsys: pytest.CaptureFixture[str]) -> str:
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    return output.err.splitlines()[-1]


def _json(bundle: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    command = ["generate", str(bundle), "--prompt", PROMPT, "--max-new-tokens", "8", "--json", *options]
    assert run(command) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    result: dict[str, Any] = json.loads(printed.out)
    return result


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"edgekv {metadata.version('edgekv')}\n"


def test_the_help_groups_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    listed = capsys.readouterr().out.partition("Start here:\n")[2]
    titles = re.findall(r"^(\S.*):$", listed, re.M)
    assert titles == ["Run", "Measure", "Other runtimes", "Devices", "What is kept"]
    names = re.findall(r"^  (\S+)", listed, re.M)
    assert {*names[:4]} == {"chat", "doctor", "export", "plan"} and len(names) == len(set(names)) == len(
        find_commands()
    )


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "pull": "edgekv export org/model -o BUNDLE downloads a checkpoint",
        "list": "edgekv info BUNDLE says what one is",
        "genrate": "Did you mean generate",
        "xyzzy": "See edgekv --help",
    }.items(),
)
def test_an_unknown_command_is_told_what_to_do_instead(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([name, "smolm2"]) == 2
    printed = capsys.readouterr()
    assert f"command: got '{name}'" in printed.err and said in printed.err and printed.out == ""


def test_a_prompt_may_follow_the_bundle(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for prompt in ([PROMPT], ["-p", PROMPT], ["--prompt", PROMPT]):
        assert run(["generate", str(bundle), *prompt, "--max-new-tokens", "4", "-q"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] and len(set(texts)) == 1
    assert run(["generate", str(bundle), "a", "-p", "b"]) == 2
    assert "got PROMPT and --prompt; expected one of them" in capsys.readouterr().err


def test_text_streams_to_stdout_and_figures_to_stderr(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = _json(bundle, capsys)["text"]
    assert run(["generate", str(bundle), "--prompt", PROMPT, "--max-new-tokens", "8"]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected + "\n"
    assert printed.err.startswith("[cpu-fast: ") and "8 tokens, ended by length" in printed.err
    assert run(["generate", str(bundle), "--prompt", PROMPT, "--max-new-tokens", "8", "--cpu-mode", "emulate"]) == 0
    assert capsys.readouterr().err.startswith("[cpu-emulate: ")


def test_a_baked_prefix_is_of_the_default_mode(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text := tmp_path / "text").write_text("To be continued, with a")
    assert run(["prefix", "bake", str(small), str(text)]) == 0
    assert capsys.readouterr().out.endswith(" tokens, cpu-fast\n")
    assert run(["generate", str(small), "--prompt", f"{text.read_text()} word", "--max-new-tokens", "1"]) == 0
    assert " restored)" in capsys.readouterr().err


def test_json_has_everything(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _json(bundle, capsys, "--reserve", "1.5")
    assert list(result) == ["schema", "prompt_tokens", "tokens", "text", "stats", "experts"]
    assert result["schema"] == 1
    assert len(result["tokens"]) == result["stats"]["generated_tokens"] == 8
    assert (result["stats"]["setup"]["kv_update"], result["stats"]["setup"]["reserve"]) == ("pointer-shift", 1.5)


def test_the_prompt_may_come_from_a_file(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    expected = _json(bundle, capsys)
    command = [
        "generate",
        str(bundle),
        "--prompt-file",
        str(tmp_path / "prompt.txt"),
        "--max-new-tokens",
        "8",
        "--json",
    ]
    assert run(command) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == expected["tokens"]


@pytest.mark.htp
def test_the_htp_prints_nothing_but_the_answer(bundle: Path) -> None:
    """In a process of its own: Qualcomm's libraries write to the descriptors, past Python."""
    command = ["generate", str(bundle), "--prompt", PROMPT, "--max-new-tokens", "2", "--engine", "htp", "--json"]
    done = subprocess.run([sys.executable, "-m", "edgekv", *command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["stats"]["setup"]["engine"] == "htp"
    (line,) = done.stderr.splitlines()
    assert line.startswith("edgekv: warning: bundle is not compiled for SM8650")


@pytest.mark.slow
def test_a_reader_that_has_gone_is_no_bug(bundle: Path) -> None:
    command = [sys.executable, "-m", "edgekv", "generate", str(bundle), "--prompt", PROMPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "NONE", "--prompt", "x"], 1, "got nothing there; expected a bundle's folder"),
        (["generate", "NONE"], 2, "PROMPT, --prompt, --prompt-file: got none of them; expected one of them"),
        (
            ["generate", "NONE", "--prompt", "x", "--prompt-file", "y"],
            2,
            "got --prompt and --prompt-file; expected one",
        ),
        (["generate", "NONE", "--prompt-file", "NONE"], 2, "No such file"),
        (["generate", "NONE", "--prompt", "x", "--no-such-option"], 2, "No such option"),
        (["generate", "NONE", "--prompt", "x", "--top-k", "many"], 2, "Invalid value for '--top-k'"),
        (["no-such-command"], 2, "command: got 'no-such-command'; expected one of edgekv --help"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([str(tmp_path / "none") if a == "NONE" else a for a in arguments]) == code
    assert message in _last_line(capsys)


@pytest.mark.parametrize(
    ("option", "value", "code", "message"),
    [
        ("--engine", "gpu", 2, "--engine: got 'gpu'; expected cpu or htp"),
        ("--kv-update", "copy", 2, "--kv-update: got 'copy'; expected "),
        ("--reserve", "3", 2, "--reserve: got 3; expected a number above 1"),
        ("--context-policy", "forget", 2, "--context-policy: got 'forget'"),
        ("--max-new-tokens", "0", 2, "--max-new-tokens: got 0"),
        ("--temperature", "-1", 2, "--temperature: got -1.0"),
        ("--seed", "1", 2, "--seed: got 1 at temperature 0"),
        ("--prompt", "x" * 4000, 1, "prompt: got "),
    ],
)
def test_bad_values_are_named(
    bundle: Path, option: str, value: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(bundle), "--prompt", "x", option, value]) == code
    assert message in _last_line(capsys)


@pytest.mark.slow
def test_a_broken_command_of_another_package_is_named_and_left_out(tmp_path: Path) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[edgekv.command_tables]\nother = commands:COMMANDS\nnone = no_such_module:COMMANDS\n"
    )
    (tmp_path / "commands.py").write_text(
        "from edgekv.cli.commands import Entry\n"
        "COMMANDS = [Entry('broken', 'no_such_module:command', 'Break.'), Entry('generate', 'other:mine', 'Repeat.'),\n"
        "    Entry('hello', 'other:hello', 'Greet.'), Entry('greet', 'other:greet', 'Greet somehow.')]\n"
    )
    (tmp_path / "other.py").write_text(
        "from typing import Annotated\n"
        "from edgekv.cli.command import Group, command\n"
        "from edgekv.option import Argument\n"
        "def say(name: Annotated[str, Argument('Whom.')]) -> None:\n    print('hello', name)\n"
        "hello, greet = command(say), Group()\n"
        "greet.command('in-english')(say)\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "edgekv", *arguments]
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)

    everything = call("--help")
    assert everything.returncode == 0
    assert "warning: commands of none (no_such_module:COMMANDS) are left out: ModuleNotFound" in everything.stderr
    assert "warning: the command generate (other:mine) is left out: the name is taken" in everything.stderr
    assert re.search(r"^Commands of other packages:\n(  .*\n)*  hello +Greet\.\n", everything.stdout, re.M)
    assert call("hello", "there").stdout == "hello there\n"
    assert call("greet", "in-english", "there").stdout == "hello there\n"
    broken = call("broken")
    assert broken.returncode == 2
    assert "warning: the command broken (no_such_module:command) is left out: ModuleNotFound" in broken.stderr


_PLUGIN = """
import os, signal
try:
    os.kill(os.getpid(), signal.{signal})
    sum(range(1000))  # Python runs the handler now
except BaseException:  # as native modules do
    raise ImportError("initialization failed")
import json.tool
from edgekv.cli.command import command
@command
def late() -> None:
    import time
    time.sleep(20)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_during_an_import_ends_the_program_in_silence(tmp_path: Path, name: str) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[edgekv.command_tables]\nother = commands:COMMANDS\n")
    table = "from edgekv.cli.commands import Entry\nCOMMANDS = [Entry('late', 'other:late', 'Wait.')]\n"
    (tmp_path / "commands.py").write_text(table)
    (tmp_path / "other.py").write_text(_PLUGIN.format(signal=name))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "edgekv", "late"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=15, preexec_fn=interruptible
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + getattr(signal, name), "", "")


_LOSES = """
import os, signal, sys, time
from edgekv.cli.exit_codes import exit_code_of, signals_as_exceptions

class Loses:
    def __del__(self):  # an exception of a finalizer is printed and dropped
        os.kill(os.getpid(), signal.SIGTERM)

def call():
    loses = Loses()
    del loses
    try:
        time.sleep(20)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.5)  # neither a second signal nor the same one again interrupts the cleanup
        print("cleaned up")

with signals_as_exceptions():
    sys.exit(exit_code_of(call))
"""


def test_a_signal_whose_exception_is_lost_comes_again() -> None:
    done = subprocess.run([sys.executable, "-c", _LOSES], capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "cleaned up\n")


_HELD = """
import asyncio, os, signal, sys
from edgekv.cli.exit_codes import exit_code_of, held_signals, signals_as_exceptions

async def task():
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
    print("the task ended")

def call():
    with held_signals(lambda: print("arrived")):
        asyncio.run(task())
    print("not reached")

with signals_as_exceptions():
    sys.exit(exit_code_of(call))
"""


def test_a_held_signal_raises_when_the_event_loop_has_ended() -> None:
    done = subprocess.run([sys.executable, "-c", _HELD], capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, 3 * "arrived\n" + "the task ended\n")


def test_each_kind_of_failure_has_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"got": 1, "expected": 2, "fix": "Count again."}
    assert _raising(BundleError("fingers", **facts)) == 1
    assert _last_line(capsys) == "edgekv: error: fingers: got 1; expected 2. Count again."
    assert _raising(UsageError("fingers", **facts)) == 2
    assert exit_code_of(lambda: print(find("no such chip"))) == 2
    assert "device: got 'no such chip'" in _last_line(capsys)
    assert _raising(KeyboardInterrupt()) == 130
    assert _raising(MemoryError()) == 1
    assert _raising(PermissionError(errno.EACCES, "Permission denied", "/etc/shadow")) == 1
    assert _last_line(capsys) == "edgekv: error: /etc/shadow: Permission denied"
    assert _raising(SystemExit(3)) == 3
    assert exit_code_of(lambda: None) == 0


def test_a_bug_shows_its_traceback_to_those_who_ask(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _raising(ZeroDivisionError("none left")) == 1
    assert "ZeroDivisionError: none left. This is a bug" in _last_line(capsys)
    monkeypatch.setenv("EDGEKV_DEBUG", "1")
    assert _raising(ZeroDivisionError("none left")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_importing_edgekv_does_not_import_the_runtime() -> None:
    code = "import sys, edgekv, edgekv.cli; print('onnxruntime' in sys.modules, 'onnx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--prompt", "--prompt-file"])
def test_the_prompt_may_come_from_standard_input(bundle: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    command = [sys.executable, "-m", "edgekv", "tokenize", str(bundle), option, "-", "--json"]
    done = subprocess.run(command, input=PROMPT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["tokens"] == _json(bundle, capsys)["prompt_tokens"]
    done = subprocess.run(command, input=b"\xff\xfe", capture_output=True)
    assert done.returncode == 2
    assert f"{option}: got -: 'utf-8' codec can't decode".encode() in done.stderr


def test_a_prompt_file_must_be_a_regular_file(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(bundle), "--prompt-file", "/dev/zero"]) == 2
    assert "--prompt-file: got /dev/zero: " in _last_line(capsys)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a pipe of a size that the test chooses")
def test_ctrl_c_keeps_what_was_computed(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl
    import termios

    def waiting_bytes() -> int:
        return int.from_bytes(fcntl.ioctl(reading, termios.FIONREAD, bytes(4)), sys.byteorder)

    command = [sys.executable, "-m", "edgekv", "generate", str(bundle), "--prompt", PROMPT, "--max-new-tokens", "100"]
    options = ["--prefix-cache", str(tmp_path)]
    reading, writing = os.pipe()
    full = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096) - 16  # room for a few tokens: the command waits then
    os.write(writing, bytes(full))
    pipes = {"stdout": writing, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, *options], **pipes, preexec_fn=interruptible) as child:
        os.close(writing)
        while child.poll() is None and waiting_bytes() == full:
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        with os.fdopen(reading, "rb") as text:
            text.read()
        assert child.stderr is not None
        error = child.stderr.read().decode()
    assert child.returncode == 130
    assert "ended by an interruption" in error and "Traceback" not in error
    stats = _json(bundle, capsys, *options)["stats"]
    assert stats["cache"]["restored_tokens"] == stats["prompt_tokens"] - 1


def test_tokens_of_a_text_are_printed(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tokenize", str(bundle), "--prompt", PROMPT + "é"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == "       0  '<|begin_of_text|>'"
    assert "'import'" in lines[1]
    assert printed.err == f"[{len(lines)} tokens; the context holds 128]\n"
    assert run(["tokenize", str(bundle), "--prompt", PROMPT + "é", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert list(output) == ["schema", "tokens", "pieces", "count", "context"]
    assert [int(line.split()[0]) for line in lines] == output["tokens"]
    assert "".join(output["pieces"][1:4]) == "import os\n"


@pytest.mark.slow
def test_sampling_options_reach_the_sampler(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = _json(bundle, capsys)["tokens"]
    forbidden = _json(bundle, capsys, "--logit-bias", f"{free[0]}:-100", "--ignore-eos", "--repetition-penalty", "1.3")
    assert free[0] not in forbidden["tokens"]
    sampling = forbidden["stats"]["sampling"]
    assert sampling["logit_bias"] == {str(free[0]): -100.0}
    assert (sampling["ignore_eos"], sampling["repetition_penalty"]) == (True, 1.3)
    options = ("--temperature", "0.9", "--min-p", "0.2", "--presence-penalty", "0.5", "--frequency-penalty", "-1")
    sampling = _json(bundle, capsys, *options, "--seed", "3")["stats"]["sampling"]
    assert [sampling[name] for name in ("temperature", "min_p", "presence_penalty", "frequency_penalty", "seed")] == [
        0.9,
        0.2,
        0.5,
        -1.0,
        3,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "1e-310"], "--temperature: got 1e-310; expected 0, or at least 0.00001"),
        (["--temperature", "nan"], "temperature: got nan; expected a number"),
        (["--temperature", "9" * 5000], "temperature: got inf"),
        (["--max-new-tokens", "9" * 5000], "Invalid value for '--max-new-tokens'"),
        (["--logit-bias", "9" * 5000 + ":1"], "--logit-bias: got "),
        (["--logit-bias", f"{2**32}:1"], "--logit-bias: got 4294967296"),
        (["--logit-bias", "5"], "--logit-bias: got '5'; expected ID:BIAS"),
        (["--cache-mode", f"long-sequence-only({'9' * 5000})"], "--cache-mode: got"),
        (["--cache-mode", f"adaptive({'9' * 5000})"], "--cache-mode: got"),
        (["--cache-mode", f"adaptive({'9' * 5000}%)"], "--cache-mode: got"),
        (["--retention", f"0-9:{'9' * 5000}"], "--retention: got"),
        (["--threads", str(2**31)], "--threads: got 2147483648"),
        (["--threads", "9" * 5000], "Invalid value for '--threads'"),
    ],
)
def test_absurd_numbers_are_refused(
    bundle: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(bundle), "--prompt", "x", *arguments]) == 2
    error = _last_line(capsys)
    assert message in error and "This is a bug" not in error


@pytest.mark.slow
def test_a_salt_in_the_environment_is_for_prefix_caches_alone(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _json(bundle, capsys)
    for salt in ("mine", ""):
        monkeypatch.setenv("EDGEKV_CACHE_SALT", salt)
        assert _json(bundle, capsys)["tokens"] == plain["tokens"]
    restored = []
    for salt in ("mine", "mine", "theirs"):
        monkeypatch.setenv("EDGEKV_CACHE_SALT", salt)
        stats = _json(bundle, capsys, "--prefix-cache", str(tmp_path))["stats"]
        restored.append(stats["cache"]["restored_tokens"] > 0)
    assert restored == [False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "found"), [("gener", "generate"), ("tok", "tokenize"), ("exp", "export")])
def test_shells_complete_commands(typed: str, found: str) -> None:
    words = {"_EDGEKV_COMPLETE": "bash_complete", "COMP_WORDS": f"edgekv {typed}", "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "from edgekv.cli import main; main()"]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True)
    assert done.stdout.split() == [f"plain,{found}"]


def test_a_reader_that_has_gone_on_windows_is_no_bug() -> None:
    """There it is EINVAL instead of EPIPE; a name that the file system refuses is EINVAL too."""
    program = (
        "import os, sys; from edgekv.cli.exit_codes import exit_code_of; os.name = 'nt'\n"
        "def call(): raise OSError(22, 'Invalid argument', *sys.argv[1:])\n"
        "sys.exit(exit_code_of(call))"
    )
    for names, message in ([], ""), (["a?b"], "edgekv: error: a?b: Invalid argument\n"):
        done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, message)


def test_the_steps_of_a_command_are_told_to_those_who_ask(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(bundle), "--prompt", PROMPT, "--max-new-tokens", "2"]
    assert run([*command, "-v"]) == 0
    told = capsys.readouterr()
    assert re.search(r"^edgekv: verify \d+ files of \S+: \d\.\d\d s\nedgekv: ", told.err) and "[cpu-fast" in told.err
    assert run([*command, "-q"]) == 0
    assert capsys.readouterr() == (told.out, "")
    assert run([*command, "-q", "-v"]) == 2
    assert "--verbose: got it with --quiet; expected one of them" in _last_line(capsys)
