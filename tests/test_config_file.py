"""Defaults of options from a file."""

import json
import re
from pathlib import Path

import pytest

from edgekv.cli import run


def config(folder: Path, text: str) -> str:
    (folder / "own.toml").write_text(text)
    return str(folder / "own.toml")


def generated(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    assert run(arguments) == 0
    return json.loads(capsys.readouterr().out)["stats"]["generated_tokens"]


def test_a_file_sets_defaults_and_the_command_line_goes_first(bundle: Path, tmp_path: Path, capsys) -> None:
    file = config(tmp_path, "[generate]\nmax-new-tokens = 3\njson = true\nignore-eos = true\n[serve]\nport = 1\n")
    command = ["--config", file, "generate", str(bundle), "--prompt", "The"]
    assert generated(command, capsys) == 3
    assert generated([*command, "--max-new-tokens", "2"], capsys) == 2


def test_a_command_of_a_group_has_a_table_within_it(tmp_path: Path, capsys) -> None:
    file = config(tmp_path, "[prefix.ls]\njson = true\n")
    assert run(["--config", file, "prefix", "ls", "--help"]) == 0
    assert "[default: yes]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[generate\n", "expected TOML"),
        ("[generat]\ntop-k = 1\n", "generat: got no name of a command.*Did you mean generate"),
        ("[generate]\nmax-new-token = 1\n", "generate: max-new-token: got no name of an option.*max-new-tokens"),
        ("generate = 3\n", r"generate: got 3; expected a table, \[generate\]"),
        ("[generate]\ntop-k = 'many'\n", "Invalid value for '--top-k'"),
        ("\xff", "expected TOML"),
    ],
)
def test_what_is_wrong_in_it_is_named(bundle: Path, tmp_path: Path, capsys, text: str, said: str) -> None:
    file = tmp_path / "own.toml"
    file.write_bytes(text.encode("latin-1"))
    assert run(["--config", str(file), "generate", str(bundle), "--prompt", "The"]) == 2
    told = capsys.readouterr()
    assert not told.out
    assert re.search(said, told.err, re.DOTALL), told.err


def test_a_file_that_is_not_there_is_named(bundle: Path, tmp_path: Path, capsys) -> None:
    assert run(["--config", str(tmp_path / "none.toml"), "size", str(bundle)]) == 2
    assert "none.toml: got No such file" in capsys.readouterr().err
