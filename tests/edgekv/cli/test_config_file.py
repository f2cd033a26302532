"""Defaults of options from a file."""

import datetime
import json
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from edgekv.cli import run
from edgekv.cli.commands import find_commands
from edgekv.cli.config_file import _options
from edgekv.errors import UsageError


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
        ("[generate]\ntop-k = 'many'\n", r"own\.toml: generate: top-k: got 'many'; expected a whole number"),
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


WRONG = {
    "max-new-tokens": ["3.5", "true", "[3]", "{}", "1979-05-27", "'many'", "''", "inf"],
    "temperature": ["true", "'warm'", "[0.5]", "{}", "-1"],
    "json": ["1", "'yes'", "[true]", "0.0", "{}"],
    "stop": ["[1]", "1", "true", "[['a']]", "[true]", "{}", "[{}]"],
    "prompt": ["1", "true", "['a']", "[]", "1979-05-27"],
    "session": ["1", "true", "''", "['a']"],
    "logit-bias": ["true", "[true]", "'many'", "{}"],
    "early-stopping": ["true", "'many'", "{}", "[]"],
    "cache-mode": ["true", "{}", "[1]"],
    "kv-update": ["1", "true", "[]"],
    "htp": ["true", "3", "'many'", "{}", "[true]"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_each_value_is_checked_as_the_option_is(bundle: Path, tmp_path: Path, capsys, key: str, value: str) -> None:
    file = config(tmp_path, f"[generate]\n{key} = {value}\n")
    code = run(["--config", file, "generate", str(bundle), "--prompt", "The", "--max-new-tokens", "1"])
    told = capsys.readouterr()
    assert code == 2 and not told.out and "bug" not in told.err, told.err


@pytest.mark.parametrize(
    "lines",
    [
        "max-new-tokens = '2'\ntop-k = 3\ntemperature = 1\nseed = 7",
        "stop = ['a', 'b']\nlogit-bias = ['3:1', '4:-1']\nmax-new-tokens = 2",
        "stop = 'q'\nlogit-bias = '3:1'\nmax-new-tokens = 2\nignore-eos = true\njson = true",
        "json = false\nignore-eos = false\nmax-new-tokens = 2",
    ],
)
def test_a_value_means_what_it_means_on_the_command_line(bundle: Path, tmp_path: Path, capsys, lines: str) -> None:
    words = []
    for key, value in tomllib.loads(lines).items():
        for each in value if isinstance(value, list) else [value]:
            words += [f"--{key}"] * (each is not False) + [str(each)] * (not isinstance(each, bool))
    command = ["generate", str(bundle), "--prompt", "The"]
    assert run(["--config", config(tmp_path, f"[generate]\n{lines}\n"), *command]) == 0
    told = capsys.readouterr().out
    assert run([*command, *words]) == 0
    assert [line.split('"stats"')[0] for line in capsys.readouterr().out.splitlines()][:1] == [
        line.split('"stats"')[0] for line in told.splitlines()
    ][:1]


def test_lists_stand_for_texts_with_commas(bundle: Path, tmp_path: Path, capsys) -> None:
    file = config(tmp_path, "[bench]\nprompt-tokens = [4, 8]\nnew-tokens = 1\nrepetitions = 1\njson = true\n")
    assert run(["--config", file, "bench", str(bundle)]) == 0
    assert capsys.readouterr().out


def test_a_file_that_is_not_there_is_named(bundle: Path, tmp_path: Path, capsys) -> None:
    assert run(["--config", str(tmp_path / "none.toml"), "size", str(bundle)]) == 2
    assert "none.toml: got No such file" in capsys.readouterr().err


def _commands(command: click.Command) -> Iterator[click.Command]:
    if not isinstance(command, click.Group):
        yield command
        return
    for name in command.list_commands(click.Context(command)):
        within = command.get_command(click.Context(command), name)
        assert within is not None
        yield from _commands(within)


def test_no_value_of_any_option_is_a_bug() -> None:
    """A value is refused by the name of its key, or means what a word of the command line means."""
    values = [True, False, 3, 3.5, -1, "text", "", [], [1], [True], ["a", {}], {}, datetime.date(1979, 5, 27), math.nan]
    for entry in find_commands().values():
        for command in _commands(entry.load()):
            for option in command.params:
                if not isinstance(option, click.Option):
                    continue
                key = max(option.opts, key=len).lstrip("-")
                for value in values:
                    try:
                        found = _options("file", {key: value}, command)
                    except UsageError as error:
                        assert error.field.startswith(f"file: {key}")
                        continue
                    (taken,) = found.values() if found else [False]
                    words = taken if isinstance(taken, list) else [taken]
                    assert all(isinstance(word, str) for word in words) or isinstance(taken, bool)
                    assert option.is_flag == isinstance(value, bool), (command.name, key, value)
