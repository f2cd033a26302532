"""The sandbox that chat templates run in: transformers' environment, with limits on loops and products of texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment, Template

MOST_ITERATIONS = 1_000_000
_KEPT = 16

_iterations: ContextVar[list[int]] = ContextVar("iterations")
"""How many iterations are left to the rendering of this thread or task."""


@lru_cache(maxsize=_KEPT)
def compiled(source: str) -> Template:
    """A template, which may be rendered within `counted_iterations`. Compiling takes longer than most renderings.

    Raises:
        TemplateError: Jinja cannot compile it.
    """
    return _environment().from_string(source)


@contextmanager
def counted_iterations() -> Iterator[None]:
    """Limit the iterations of all loops that run within."""
    token = _iterations.set([MOST_ITERATIONS])
    try:
        yield
    finally:
        _iterations.reset(token)


@cache
def _environment() -> Environment:
    from jinja2 import TemplateRuntimeError, nodes
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Limited(ImmutableSandboxedEnvironment):
        """Counts the iterations of all loops of a rendering."""

        intercepted_binops = frozenset({"*", "**"})

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            template = super()._parse(source, name, filename)
            for loop in template.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
            return template

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "*" and not all(isinstance(each, (int, float)) for each in (left, right)):
                raise TemplateRuntimeError("multiplies a text or a list")
            if operator == "**" and (abs(left) > 1 << 32 or abs(right) > 64):
                raise TemplateRuntimeError("a power that is too large")
            return super().call_binop(context, operator, left, right)

    def counted(items: Iterable[Any]) -> Iterator[Any]:
        left = _iterations.get()
        for item in items:
            left[0] -= 1
            if left[0] < 0:
                raise TemplateRuntimeError(f"more than {MOST_ITERATIONS:,} iterations")
            yield item

    def refuse(message: str) -> None:
        raise TemplateRuntimeError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = Limited(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters |= {"tojson": to_json, "_counted": counted}
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment
