"""The option `--rehash`, which every command on a bundle has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

_OPTION = Annotated[
    bool,
    typer.Option("--rehash", help="Hash all files of the bundle again, even those verified before and not changed."),
]


def with_rehash(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the option `--rehash`, if it takes a bundle; the same command otherwise."""
    signature = inspect.signature(command, eval_str=True)
    if "bundle" not in signature.parameters or "rehash" in signature.parameters:
        return command

    @functools.wraps(command)
    def rehashing(*args: Any, rehash: bool, **kwargs: Any) -> Any:
        if rehash:
            from edgekv.bundle import force_rehash  # slow to import

            force_rehash()
        return command(*args, **kwargs)

    option = inspect.Parameter("rehash", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_OPTION)
    parameters = [*signature.parameters.values(), option]
    rehashing.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    rehashing.__annotations__ = {each.name: each.annotation for each in parameters}
    return rehashing
