"""The sandbox of chat templates: a child process with limits on time and memory that compiles and renders them.

The environment is that of transformers, with limits on loops and products, so that most bad templates are refused alike
on all machines. Everything else is bounded by the process: Jinja computes constants while it compiles,
and filters, `%` and `~` make texts of any length. Only Linux limits the memory of the process.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from edgekv.machine.child import CallFailedError, Child, ChildEndedError, Limits

if TYPE_CHECKING:
    from jinja2 import Environment, Template as JinjaTemplate

MAX_ITERATIONS = 1_000_000
LARGEST_PROMPT_CHARACTERS = 1 << 24
LIMIT_S = 10.0
LIMIT_BYTES = 1 << 30
"""Address space of the child: the interpreter with Jinja takes a tenth of it."""
_KEPT = 16
_LIMITS = Limits(timeout_s=LIMIT_S, memory_bytes=LIMIT_BYTES)

_iterations_left = 0


class TemplateFailedError(Exception):
    """A template that cannot be compiled or rendered: it is wrong, or refuses the messages."""


class TemplateLimitError(Exception):
    """A template that exceeds a limit."""


def compile_sandboxed(source: str) -> None:
    """Compile a template in the child process.

    Raises:
        TemplateFailedError: Jinja cannot compile it.
        TemplateLimitError: it takes too long, or too much memory.
    """
    _sandbox(os.getpid()).answer(source, None)


def render_sandboxed(source: str, variables: Mapping[str, Any]) -> str:
    """Render a template in the child process.

    Args:
        variables: its variables: values that JSON has.

    Raises:
        TemplateFailedError: it fails, or refuses the messages.
        TemplateLimitError: it takes too long, too much memory, or renders too much.
        TypeError: a variable that JSON does not have.
        ValueError: a variable that contains itself.
    """
    return _sandbox(os.getpid()).answer(source, variables)


class Template(msgspec.Struct, frozen=True):
    """A template, and the JSON of its variables; without them it is only compiled."""

    source: str
    variables: str | None = None


class _Sandbox:
    """The child process. It is started for the first template, and again after one that ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: Child | None = None
        atexit.register(self._close)

    def answer(self, source: str, variables: Mapping[str, Any] | None) -> str:
        plain = None if variables is None else json.dumps(variables, default=_plain)
        with self._lock:
            try:
                text: str = json.loads(self._ask(Template(source, plain)))
                return text
            except TemplateFailedError:
                raise
            except BaseException:  # its memory may be used up; or Ctrl-C, and the answer is still to come
                self._close()
                raise

    def _ask(self, template: Template) -> str:
        is_new = self._child is None
        child = self._child = self._child or Child(_LIMITS)
        try:
            return child.call(answer, template)
        except ChildEndedError as error:
            self._close()
            if not is_new and not error.timed_out:  # it may have ended while it had nothing to do
                return self._ask(template)
            ending = error.ending if error.timed_out else f"an end by {error.ending.partition(':')[0]}"
            raise TemplateLimitError(ending) from None
        except CallFailedError as error:
            raise TemplateLimitError(error.kind) from None

    def _close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()


@cache
def _sandbox(process: int) -> _Sandbox:
    """The sandbox of a process; a fork of it must not use the same pipes."""
    return _Sandbox()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__}, which JSON does not have")


def answer(template: Template) -> str:
    """Compile a template and render it, in this process.

    Returns:
        The text as JSON in ASCII: it may have surrogates, which UTF-8 has not.

    Raises:
        TemplateFailedError: it cannot be compiled or rendered.
        TemplateLimitError: it exceeds a limit.
    """
    global _iterations_left
    try:
        compiled = _compiled(template.source)
        if template.variables is None:
            return '""'
        _iterations_left = MAX_ITERATIONS
        kept, length = [], 0
        for piece in compiled.generate(json.loads(template.variables)):
            kept.append(piece)
            length += len(piece)
            if length > LARGEST_PROMPT_CHARACTERS:
                break
    except (RecursionError, MemoryError) as error:
        raise TemplateLimitError(type(error).__name__) from None
    except Exception as error:  # TemplateError, and whatever Python raises for the program that Jinja makes
        raise TemplateFailedError(f"{type(error).__name__}: {error}"[:1000]) from None
    if length > LARGEST_PROMPT_CHARACTERS:
        raise TemplateLimitError(f"more than {LARGEST_PROMPT_CHARACTERS:,} characters")
    return json.dumps("".join(kept))


@lru_cache(maxsize=_KEPT)
def _compiled(source: str) -> JinjaTemplate:
    """A template. Compiling takes longer than most renderings."""
    return _environment().from_string(source)


@cache
def _environment() -> Environment:
    from jinja2 import TemplateRuntimeError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class LimitedEnvironment(ImmutableSandboxedEnvironment):
        """Counts the iterations of all loops of a rendering."""

        intercepted_binops = frozenset({"*", "**"})

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            template = super()._parse(source, name, filename)
            for loop in template.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
            return template

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "*":
                repeated, count = (right, left) if isinstance(left, int) else (left, right)
                if isinstance(repeated, (str, list, tuple)) and isinstance(count, int):
                    max_elements = LARGEST_PROMPT_CHARACTERS if isinstance(repeated, str) else MAX_ITERATIONS
                    if len(repeated) * count > max_elements:
                        raise TemplateRuntimeError(f"a product of more than {max_elements:,} elements")
            if operator == "**" and (abs(left) > 1 << 32 or abs(right) > 64):
                raise TemplateRuntimeError("a power that is too large")
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        """`{% generation %}` marks what the model says, for training; as in transformers, it is a scope of its own."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("said"), [], [], body).set_lineno(line)

        def said(self, caller: Callable[[], str]) -> str:
            return caller()

    class Variables(Namespace):
        """A namespace whose names do not begin with an underscore."""

        def __init__(*args: Any, **named: Any) -> None:
            self, *others = args  # so that a variable may be called self
            content = dict(*others, **named)
            for name in content:
                check_name(name)
            Namespace.__init__(self, content)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            Namespace.__setitem__(self, name, value)

    class Dictionary:
        """What templates may call of `dict`."""

        def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
            return dict(*args, **named)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"the name {name!r} in a namespace")

    def counted(items: Iterable[Any]) -> Iterator[Any]:
        global _iterations_left
        for item in items:
            _iterations_left -= 1
            if _iterations_left < 0:
                raise TemplateRuntimeError(f"more than {MAX_ITERATIONS:,} iterations")
            yield item

    def refuse(message: str) -> None:
        raise TemplateRuntimeError(message)

    def to_json(
        x: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters |= {"tojson": to_json, "_counted": counted}
    environment.globals |= {
        "dict": Dictionary(),
        "namespace": Variables,
        "raise_exception": refuse,
        "strftime_now": strftime_now,
    }
    return environment
