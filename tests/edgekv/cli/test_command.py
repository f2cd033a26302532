"""Options from the fields of dataclasses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner

import edgekv
from edgekv.cli import run
from edgekv.cli.command import OptionValues, command, option_words
from edgekv.cli.commands import find_commands
from edgekv.errors import UsageError
from edgekv.option import Argument, Option, OptionGroup, parse_numbers
from edgekv.runtime.load_options import CacheOptions, EngineOptions


@dataclass(frozen=True)
class Oven:
    degrees: Annotated[int, Option("How hot.", minimum=1)]
    fan: Annotated[bool, Option("Without hot air.", "--no-fan", negates=True)] = True


@dataclass(frozen=True)
class Cake:
    layers: Annotated[Sequence[int], Option("Of each, in mm.", "-l --layers", parse=parse_numbers)] = (10, 5)
    icing: Annotated[Literal["sugar", "none"], Option("What is on top.", group="Decoration")] = "none"
    names: Annotated[Sequence[str], Option("Written on it.", "--name", group="Decoration")] = ()
    candles: int = 0
    oven: Annotated[Oven | None, OptionGroup("Oven")] = None
    filling: Annotated[str, Option("Between the layers.", parse=lambda _, text: _filled(text), subjects=("cream",))] = (
        ""
    )

    def __post_init__(self) -> None:
        if len(self.layers) > 3:
            raise UsageError("layers", got=len(self.layers), expected="at most 3", fix="Bake two.")


def _filled(text: str) -> str:
    if text.isdigit():
        raise UsageError("cream sour" if text == "1" else "cream", got=text, expected="a word", fix="Taste it.")
    return text


made: list[Any] = []


@command
def bake(
    place: Annotated[Path, Argument("Where.")],
    cake: Cake,
    eaten: Annotated[bool, Option("Whether it is gone.")] = False,
) -> None:
    """Bake a cake."""
    made.append((place, cake, eaten))


@command
def describe(cake: OptionValues[Cake]) -> None:
    made.append(cake)


def ran(made_by: click.Command, *arguments: str, **settings: Any) -> Any:
    result = CliRunner().invoke(made_by, arguments, catch_exceptions=False, **settings)
    assert result.exit_code == 0, result.output
    return made.pop()


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(bake, arguments)
    assert result.exit_code != 0 and not made
    return f"{result.output}{result.exception}"


def test_what_is_not_given_is_the_default_of_the_field() -> None:
    assert ran(bake, "here") == (Path("here"), Cake(), False)
    assert ran(describe) == {}


def test_each_annotated_field_is_an_option() -> None:
    given = ["-l", "1,2", "--icing", "sugar", "--name", "A", "--name", "B", "--degrees", "180", "--no-fan", "--eaten"]
    assert ran(bake, "here", *given) == (Path("here"), Cake((1, 2), "sugar", ("A", "B"), oven=Oven(180, False)), True)
    assert ran(describe, "--icing", "none") == {"icing": "none"}
    assert "--candles" not in CliRunner().invoke(bake, ["--help"]).output


def test_a_file_of_defaults_sets_them_as_the_command_line_does() -> None:
    told = {"layers": "3,4", "name": ["A"], "no_fan": True, "degrees": 200}
    assert ran(bake, "here", default_map=told)[1] == Cake((3, 4), names=("A",), oven=Oven(200, False))
    assert ran(bake, "here", "-l", "9", default_map=told)[1].layers == (9,)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layers", "1,2,3,4"], "--layers: got 4; expected at most 3"),
        (["--layers", "thick"], "--layers: got 'thick'"),
        (["--filling", "2"], "--filling: got 2; expected a word"),
        (["--filling", "1"], "--filling sour: got 1"),
        (["--icing", "jam"], "--icing: got 'jam'; expected sugar or none"),
        (["--no-fan"], "--no-fan: got it without --degrees; expected both"),
        (["--degrees", "0"], "Invalid value for '--degrees': 0 is not in the range x>=1"),
    ],
)
def test_errors_name_the_option(arguments: list[str], said: str) -> None:
    assert said in refusal("here", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "BUNDLE", "--verify"], "No such option '--verify'. It is --rehash now."),
        (["export", "CHECKPOINT", "--verify", "8"], "No such option '--verify'. It is --draft-rows now."),
        (
            ["export", "CHECKPOINT", "--learn-rounding", "1024"],
            "No such option '--learn-rounding'. It is --effort now.",
        ),
        (["compile", "BUNDLE", "--no-each"], "No such option '--no-each'. It is --no-per-graph-binaries now."),
    ],
)
def test_a_renamed_option_is_refused_with_its_name_today(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"Error: {said}"


def test_the_help_is_grouped_and_has_the_defaults_of_the_fields() -> None:
    told = CliRunner().invoke(bake, ["--help"]).output
    assert [line[:-1] for line in told.splitlines() if line.endswith(":") and line[0] != " "] == [
        "Arguments",
        "Cake",
        "Decoration",
        "Oven",
        "Options",
    ]
    assert "-l, --layers TEXT  Of each, in mm.  [default: 10,5]" in told
    assert "--no-fan" in told and "[default: yes]" not in told
    assert "[default: 3]" in CliRunner().invoke(bake, ["--help"], default_map={"layers": 3}).output


def _commands() -> Iterator[tuple[str, click.Command]]:
    for name, entry in find_commands().items():
        found = entry.load()
        if isinstance(found, click.Group):
            yield from ((f"{name} {each}", found.commands[each]) for each in found.commands)
        elif found is not None:
            yield name, found


COMMANDS = dict(_commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_and_argument_says_what_it_is_for(name: str) -> None:
    records = [each.get_help_record(click.Context(COMMANDS[name])) for each in COMMANDS[name].params]
    assert all(record is not None and record[1] for record in records)


@pytest.mark.parametrize("name", ["bench", "chat", "generate", "prefix bake", "serve", "eval", "compare"])
def test_commands_that_run_a_bundle_choose_the_engine_alike(name: str) -> None:
    generate = {each.name: each for each in COMMANDS["generate"].params}
    for option in ("engine", "cpu_mode"):
        (found,) = (each for each in COMMANDS[name].params if each.name == option)
        context = click.Context(COMMANDS[name])
        assert found.get_help_record(context) == generate[option].get_help_record(context)


def test_the_options_of_an_instance_make_it_again() -> None:
    cake = Cake((3,), "sugar", ("A", "B"), oven=Oven(9, False))
    assert option_words(Cake()) == []
    assert ran(bake, "here", *option_words(cake))[1] == cake
    assert option_words(cake, layers="1,2")[:2] == ["--layers", "1,2"]


def test_load_takes_the_fields_of_its_options_by_name_and_no_others(small_export: Path) -> None:
    records = EngineOptions(threads=1), CacheOptions(policy="sliding-window")
    keywords = {"engine": "cpu", "threads": 1, "policy": "sliding-window"}
    with edgekv.load(small_export, *records) as one, edgekv.load(small_export, **keywords) as other:
        assert one.engine.caches.policy == other.engine.caches.policy
        assert one.engine.caches.policy.name != "fail"
    with edgekv.load(small_export, *records, policy="fail") as model:
        assert model.engine.caches.policy.name == "fail"
    assert all(each.default is not MISSING for record in records for each in fields(record))
    with pytest.raises(TypeError, match="load: got the option 'thread'; expected one of engine, threads, "):
        edgekv.load(small_export, thread=1)
    with edgekv.load(small_export) as model, pytest.raises(TypeError, match="generate: got the keyword 'top'"):
        model.generate("Hi", top=1)


def _paths(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Parameter]]:
    """The options and arguments of a command, and of those within it, that name places."""
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            within = command.get_command(click.Context(command), name)
            assert within is not None
            yield from _paths(within, (*words, name))
        return
    for each in command.params:
        is_place = each.name in ("checkpoint", "store", "draft", "draft_corpus")
        if isinstance(each.type, click.Path) or (is_place and not getattr(each, "is_flag", False)):
            yield words, each


def test_no_path_may_be_empty() -> None:
    """`--prefix-cache "$CACHE"` would write into the current folder where the variable is not set."""
    found = [pair for name, entry in find_commands().items() for pair in _paths(entry.load(), (name,))]
    assert len(found) > 60
    for words, parameter in found:
        with pytest.raises(UsageError, match="got an empty path; expected a path"):
            parameter.type.convert("", parameter, None)
            raise AssertionError(f"{words}: {parameter.name}")


@pytest.mark.parametrize("words", [["generate", "BUNDLE", "--prefix-cache", ""], ["export", "", "-o", "new"]])
def test_an_empty_path_leaves_the_current_folder_alone(
    words: list[str], bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([str(bundle) if word == "BUNDLE" else word for word in words]) == 2
    assert "got an empty path" in capsys.readouterr().err and not [*tmp_path.iterdir()]
