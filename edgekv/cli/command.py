"""Commands whose options are the fields of dataclasses.

    @command
    def generate(
        bundle: Annotated[Path, Argument("A bundle's folder.")],
        sampling: Given[SamplingParams],
        engine: EngineOptions,
    ) -> None:

A parameter whose type is a dataclass stands for an option for each annotated field, and gets an instance with the
values that the user gave; `OptionValues` gets these values alone. Other parameters are annotated themselves. `click`
parses.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, Protocol, TypeVar, Union, get_args, get_origin

import click

from edgekv.cli.output import steps_on_stderr
from edgekv.errors import UsageError
from edgekv.option import Argument, Option, OptionGroup, Parser, check_place

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # no generic type before 8.4

T = TypeVar("T")

_GENERAL = "Options"
COMMON_CHIPS = "a chip, such as SM8850 or SM8750 (Snapdragon 8 Elite), SM8650 (8 Gen 3), SC8380XP (Snapdragon X)"
_ALL_CHIPS = "edgekv devices lists them all, and edgekv devices NAME finds that of a product."
_RENAMED = {
    "--verify": ("--draft-rows", "--rehash"),
    "--each": ("--per-graph-binaries",),
    "--no-each": ("--no-per-graph-binaries",),
    "--learn-rounding": ("--effort",),
}
"""Options that had another name, and the names that an error proposes, as far as the command has them."""
_REHASH = Option("Hash all files of the bundle again, even those verified before and not changed.")


class OptionValues(dict[str, Any], Generic[T]):
    """The fields of a dataclass that the user gave, by name: for defaults that are known later, such as a bundle's."""


NOTHING: OptionValues[Any] = OptionValues()
"""The default of a parameter without required options."""


class Command(click.Command):
    """A command whose parameters are those of its function; see above."""

    def __init__(self, name: str | None, callback: Callable[..., Any], params: Any = None, **settings: Any) -> None:
        parameters = inspect.signature(callback, eval_str=True).parameters.values()
        self._sources = {
            parameter.name: _source(parameter.name, parameter.annotation, _default(parameter), _GENERAL)
            for parameter in parameters
        }
        values = [value for source in self._sources.values() for value in source.values()]
        if "bundle" in self._sources:
            values.append(_Value("rehash", bool, _REHASH, False, _GENERAL))
        self._names = {value.field: value.shown for value in values}
        self._subjects = {subject: value.shown for value in values for subject in value.subjects}
        settings["help"] = inspect.getdoc(callback)
        super().__init__(name, callback=callback, params=[value.parameter for value in values], **settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            with self.naming_options():
                return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
            if renamed := [name for name in _RENAMED.get(error.option_name, ()) if name in known]:
                message = f"No such option {error.option_name!r}. It is {' or '.join(renamed)} now."
                raise click.NoSuchOption(error.option_name, message, ctx=ctx) from None
            raise
        except click.MissingParameter as error:
            if error.param is None or "--device" not in error.param.opts or ctx.resilient_parsing:
                raise
            raise UsageError("--device", got="nothing", expected=COMMON_CHIPS, fix=_ALL_CHIPS) from None

    def invoke(self, ctx: click.Context) -> Any:
        chosen = {name: value for name, value in ctx.params.items() if value is not None and value != ()}
        if chosen.pop("rehash", False):
            from edgekv.bundle import force_rehash  # slow to import

            force_rehash()
        assert self.callback is not None
        with self.naming_options(), steps_on_stderr() if "verbose" in chosen else nullcontext():
            return self.callback(**{name: source.read(chosen) for name, source in self._sources.items()})

    @contextmanager
    def naming_options(self) -> Iterator[None]:
        """Errors that name a field name its option instead."""
        try:
            yield
        except UsageError as error:
            if (name := self._option_of(error.field)) is None:
                raise
            raise type(error)(name, got=error.got, expected=error.expected, fix=error.fix) from error

    def _option_of(self, field: str) -> str | None:
        """The option that an error names by a field, with what follows its name; None if there is none."""
        if field in self._names:
            return self._names[field]
        for subject, option in self._subjects.items():
            if field == subject or field.startswith(f"{subject} "):
                return option + field[len(subject) :]
        return None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(parameter, "title", _GENERAL), []).append(record)
        sections[_GENERAL] = sections.pop(_GENERAL)  # the last: it has --help
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class Group(click.Group):
    """A group of such commands."""

    command_class = Command


command = click.command(cls=Command)
"""Makes a command of a function."""


def option_words(instance: Any, **texts: str) -> list[str]:
    """The options that make an instance of a dataclass, without those that are defaults.

    Args:
        instance: of the dataclass.
        texts: of fields whose values are not as they are given.
    """
    words = list[str]()
    for name, source in _fields(type(instance), OptionGroup(""), None, is_optional=True).items():
        value = getattr(instance, name)
        if isinstance(source, _Value):
            words += source.words(value, texts.get(name))
        elif value is not None:
            words += option_words(value)
    return words


class _Source(Protocol):
    """Where a parameter of a function, or a field of a dataclass, has its value from."""

    def values(self) -> Iterator[_Value]:
        """The options and arguments."""

    def is_given(self, chosen: Mapping[str, Any]) -> bool:
        """Whether the user gave any of them."""

    def read(self, chosen: Mapping[str, Any]) -> Any:
        """The value.

        Raises:
            UsageError: the values that were given make none.
        """


class _Value:
    """One option or argument."""

    def __init__(
        self, field: str, kind: Any, spec: Option | Argument, default: Any, title: str, *, is_optional: bool = False
    ) -> None:
        self.field, self._default = field, default
        is_required = default is MISSING and not is_optional
        self._negates = isinstance(spec, Option) and spec.negates
        self._collect = spec.collect if isinstance(spec, Option) else None
        self.subjects = spec.subjects if isinstance(spec, Option) else ()
        self.parameter: click.Parameter
        if isinstance(spec, Argument):
            self.parameter = _ArgumentOf(field, kind, spec, is_required)
            self.shown = spec.metavar or field.upper()
        else:
            self.parameter = _OptionOf(field, kind, spec, default, is_required, spec.group or title)
            self.shown = max(self.parameter.opts, key=len)
        self._name = str(self.parameter.name)

    def values(self) -> Iterator[_Value]:
        yield self

    def is_given(self, chosen: Mapping[str, Any]) -> bool:
        return self._name in chosen

    def read(self, chosen: Mapping[str, Any]) -> Any:
        if self._name not in chosen:
            return _made(self._default)
        value = chosen[self._name]
        if self._collect is not None:
            return self._collect(value)
        return not value if self._negates else value

    @property
    def is_required(self) -> bool:
        return self._default is MISSING

    def words(self, value: Any, text: str | None) -> list[str]:
        """The option with a value; none if it is the default."""
        if text is None and value == _made(self._default):
            return []
        if isinstance(self.parameter, click.Option) and self.parameter.is_flag:
            return [self.shown] if value is not self._negates else self.parameter.secondary_opts[:1]
        if text is None and self.parameter.multiple:
            return [word for member in value for word in (self.shown, str(member))]
        return [self.shown, _in_words(value) if text is None else text]


class _Record:
    """The options of a dataclass."""

    def __init__(self, kind: type[Any], default: Any, group: OptionGroup, *, is_given_alone: bool) -> None:
        self._kind, self._default, self._is_given_alone = kind, default, is_given_alone
        self._parts = _fields(kind, group, default, is_optional=default is not MISSING)

    def values(self) -> Iterator[_Value]:
        for part in self._parts.values():
            yield from part.values()

    def is_given(self, chosen: Mapping[str, Any]) -> bool:
        return any(part.is_given(chosen) for part in self._parts.values())

    def read(self, chosen: Mapping[str, Any]) -> Any:
        values = {name: part.read(chosen) for name, part in self._parts.items() if part.is_given(chosen)}
        if self._is_given_alone:
            return OptionValues(values)
        if not values and self._default is not MISSING:
            return self._default
        for name, part in self._parts.items():
            if name not in values and isinstance(part, _Value) and part.is_required:
                first = next(value.shown for value in self.values() if value.is_given(chosen))
                fix = f"Add {part.shown}, or leave it out."
                raise UsageError(first, got=f"it without {part.shown}", expected="both", fix=fix)
        if isinstance(self._default, self._kind):
            return replace(self._default, **values)
        return self._kind(**values)


class _OptionOf(click.Option):
    """An option of `click`. It has no default: the dataclass has."""

    def __init__(self, field: str, kind: Any, spec: Option, default: Any, is_required: bool, title: str) -> None:
        self.title, self._shown = title, spec.shown
        self._default = not default if spec.negates else default
        names = spec.flags.split() or [f"--{field.replace('_', '-')}"]
        longest = max((name.partition("/")[0] for name in names), key=len)
        settings: dict[str, Any] = {"is_flag": True} if kind is bool and spec.parse is None else _typed(kind, spec)
        if not is_required:  # from click 8.3 on None is a value: nothing would be missing
            settings["default"] = None
        super().__init__(
            [longest.lstrip("-").replace("-", "_"), *names],
            help=spec.help,
            required=is_required,
            metavar=spec.metavar or None,
            envvar=spec.variable or None,
            show_envvar=bool(spec.variable),
            **settings,
        )

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        assert record is not None and self.name is not None
        names, text = record
        configured = (ctx.default_map or {}).get(self.name)
        shown = _in_words(_made(self._default)) if self._shown is None else self._shown
        shown = shown if configured is None else _in_words(configured)
        return names, f"{text}  [default: {shown}]" if shown else text


class _ArgumentOf(click.Argument):
    """A positional argument of `click`, with a help text."""

    title = "Arguments"

    def __init__(self, field: str, kind: Any, spec: Argument, is_required: bool) -> None:
        self._text = spec.help
        settings = _typed(kind, spec)
        if not is_required:
            settings["default"] = None
        super().__init__([field], required=is_required, metavar=spec.metavar or None, **settings)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self._text


class _Parsed(_ParamType):
    """A value that a parser reads."""

    name = "text"

    def __init__(self, parse: Parser) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        assert param is not None
        return self._parse(max(param.opts, key=len), str(value))


class _Path(click.Path):
    """A path. An empty one would be the current folder, which nobody means: the variable of a shell is not set."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        assert param is not None
        if value == "":
            check_place(max(param.opts, key=len), value)
        return super().convert(value, param, ctx)


class _Choice(click.Choice[str]):
    """One of several words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.choices:
            return value
        assert param is not None
        expected, fix = " or ".join(self.choices), f"Use {self.choices[0]}."
        raise UsageError(max(param.opts, key=len), got=repr(value), expected=expected, fix=fix)


def takes_lists(kind: Any) -> bool:
    """Whether a file of defaults may have a list for the comma-separated text of an option of this type."""
    return isinstance(kind, _Parsed)


def _default(parameter: inspect.Parameter) -> Any:
    return MISSING if parameter.default is inspect.Parameter.empty else parameter.default


def _source(
    name: str,
    annotation: Any,
    default: Any,
    title: str,
    *,
    is_optional: bool = False,
    is_own: bool = False,
    only: tuple[str, ...] = (),
) -> _Source:
    """What a parameter or a field stands for. A default of its own is shown as it is, not in the option's words."""
    notes: tuple[Any, ...] = ()
    if get_origin(annotation) is Annotated:
        annotation, *rest = get_args(annotation)
        notes = tuple(rest)
    for note in notes:
        if isinstance(note, (Option, Argument)):
            if is_own and default is not None and isinstance(note, Option):
                note = replace(note, shown=None)
            return _Value(name, _from_text(annotation), note, default, title, is_optional=is_optional)
    groups = [note for note in notes if isinstance(note, OptionGroup)]
    is_given_alone = get_origin(annotation) is OptionValues
    kind = get_args(annotation)[0] if is_given_alone else _from_text(annotation)
    assert is_dataclass(kind) and isinstance(kind, type), f"{name} has no Option, and is no dataclass"
    group = groups[0] if groups else OptionGroup(name.replace("_", " ").capitalize())
    group = replace(group, only=only or group.only)
    return _Record(kind, _made(default), group, is_given_alone=is_given_alone)


def _fields(kind: type[Any], group: OptionGroup, instance: Any, *, is_optional: bool) -> dict[str, _Source]:
    """The annotated fields of a dataclass, with the defaults of an instance if there is one."""
    within: dict[str, list[str]] = {}
    for path in group.only:
        name, _, inner = path.partition(".")
        within.setdefault(name, []).extend([inner] if inner else [])
    module = vars(sys.modules[kind.__module__])  # a lambda in an annotation finds its names there
    names = _Names(vars(builtins) | module)
    sources = {}
    for field in fields(kind):
        if group.only and field.name not in within:
            continue
        annotation = field.type
        if isinstance(annotation, str):
            annotation = eval(annotation, module, names)
        if get_origin(annotation) is Annotated:
            is_own = isinstance(instance, kind)
            default = getattr(instance, field.name) if is_own else _field_default(field)
            only = tuple(within.get(field.name, ()))
            sources[field.name] = _source(
                field.name, annotation, default, group.title, is_optional=is_optional, is_own=is_own, only=only
            )
    return sources


class _Names(dict[str, Any]):
    """The names of a module, and a type for those that only a type checker imports."""

    def __missing__(self, name: str) -> type[_Unknown]:
        return _Unknown


class _Unknown:
    def __class_getitem__(cls, _: Any) -> type[_Unknown]:
        return cls


def _field_default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else _ToMake(field.default_factory)


@dataclass(frozen=True, slots=True)
class _ToMake:
    """A default that is made where it is needed: the help of most does not show it."""

    make: Callable[[], Any]


def _made(default: Any) -> Any:
    return default.make() if isinstance(default, _ToMake) else default


def _from_text(kind: Any) -> Any:
    """`X | None` as X, and what can be `str` among others as `str`."""
    if get_origin(kind) in (Union, UnionType):
        kinds = [member for member in get_args(kind) if member is not NoneType]
        return str if str in kinds else kinds[0]
    return kind


def _typed(kind: Any, spec: Option | Argument) -> dict[str, Any]:
    """The settings of `click` for a type."""
    if spec.parse is not None:
        repeated = {"multiple": spec.collect is not None} if isinstance(spec, Option) else {}
        return {"type": _Parsed(spec.parse), **repeated}
    if get_origin(kind) is Literal:
        return {"type": _Choice(get_args(kind))}
    if kind is Path:
        return {"type": _Path(path_type=Path)}
    if isinstance(spec, Option) and spec.minimum is not None:
        return {"type": click.FloatRange(spec.minimum) if kind is float else click.IntRange(int(spec.minimum))}
    if kind in (int, float, str):
        return {"type": kind}
    return {**_typed(get_args(kind)[0], spec), "multiple": True}


def _in_words(value: Any) -> str:
    """A default for the help; empty if it needs no mention."""
    if value is None or value is MISSING or value is False or value == () or value == {}:
        return ""
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return "yes" if value is True else str(value)
