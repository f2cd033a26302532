from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from devices import find
from edgekv.cli import run
from edgekv.cli.exit_codes import exit_code_of
from edgekv.errors import BundleError, UsageError

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


def test_the_help_lists_the_commands_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    names = [line.split()[0] for line in listed if line.startswith("  ") and line[2] != " "]
    assert names == sorted(names)
    assert {"compile", "eval", "export", "generate", "size"} <= set(names)


def test_text_streams_to_stdout_and_figures_to_stderr(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = _json(bundle, capsys)["text"]
    assert run(["generate", str(bundle), "--prompt", PROMPT, "--max-new-tokens", "8"]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected + "\n"
    assert "8 tokens, ended by length" in printed.err


def test_json_has_everything(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _json(bundle, capsys, "--reserve", "1.5")
    assert list(result) == ["schema", "prompt_tokens", "tokens", "text", "stats"]
    assert result["schema"] == 1
    assert len(result["tokens"]) == result["stats"]["generated_tokens"] == 8
    assert (result["stats"]["kv_update"], result["stats"]["reserve"]) == ("pointer-shift", 1.5)


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


def test_the_htp_prints_nothing_but_the_answer(bundle: Path) -> None:
    """In a process of its own: Qualcomm's libraries write to the descriptors, past Python."""
    command = ["generate", str(bundle), "--prompt", PROMPT, "--max-new-tokens", "2", "--engine", "htp", "--json"]
    done = subprocess.run([sys.executable, "-m", "edgekv", *command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["stats"]["engine"] == "htp"
    assert done.stderr == ""


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
        (["generate", "NONE"], 2, "--prompt, --prompt-file: got neither; expected one of them"),
        (["generate", "NONE", "--prompt", "x", "--prompt-file", "y"], 2, "got both; expected one"),
        (["generate", "NONE", "--prompt-file", "NONE"], 2, "No such file"),
        (["generate", "NONE", "--prompt", "x", "--no-such-option"], 2, "No such option: --no-such-option"),
        (["generate", "NONE", "--prompt", "x", "--top-k", "many"], 2, "Invalid value for '--top-k'"),
        (["no-such-command"], 2, "No such command 'no-such-command'"),
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
        ("--engine", "gpu", 2, "engine: got 'gpu'; expected cpu or htp"),
        ("--kv-update", "copy", 2, "update strategy: got 'copy'; expected "),
        ("--reserve", "3", 2, "reserve: got 3; expected a number above 1"),
        ("--on-full", "forget", 2, "context policy: got 'forget'"),
        ("--max-new-tokens", "0", 2, "max_new_tokens: got 0"),
        ("--temperature", "-1", 2, "temperature: got -1.0"),
        ("--seed", "1", 2, "seed: got 1 at temperature 0"),
        ("--prompt", "x" * 4000, 1, "prompt: got "),
    ],
)
def test_bad_values_are_named(
    bundle: Path, option: str, value: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(bundle), "--prompt", "x", option, value]) == code
    assert message in _last_line(capsys)


def test_a_broken_command_of_another_package_is_named_and_left_out(tmp_path: Path) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[edgekv.commands]\nbroken = no_such_module:command\ngenerate = other:mine\nhello = other:hello\n"
        "greet = other:greet\n"
    )
    (tmp_path / "other.py").write_text(
        "import typer\n"
        "def hello(name: str) -> None:\n    'Greet.'\n    print('hello', name)\n"
        "greet = typer.Typer()\n"
        "greet.callback()(lambda: None)\n"
        "greet.command('in-english')(hello)\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "edgekv", *arguments]
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)

    everything = call("--help")
    assert everything.returncode == 0
    assert "warning: the command broken (no_such_module:command) is left out: ModuleNotFound" in everything.stderr
    assert "warning: the command generate (other:mine) is left out: the name is taken" in everything.stderr
    assert call("hello", "there").stdout == "hello there\n"
    assert call("greet", "in-english", "there").stdout == "hello there\n"
    assert call("broken").returncode == 2


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
