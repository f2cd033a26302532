"""The option `--verify`, which every command on a bundle has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

_OPTION = Annotated[
    bool,
    typer.Option("--verify", help="Hash all files of the bundle again, even those verified before and not changed."),
]


def with_verify(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the option `--verify`, if it takes a bundle; the same command otherwise."""
    signature = inspect.signature(command, eval_str=True)
    if "bundle" not in signature.parameters or "verify" in signature.parameters:
        return command

    @functools.wraps(command)
    def verifying(*args: Any, verify: bool, **kwargs: Any) -> Any:
        if verify:
            from edgekv.bundle import force_rehash  # slow to import

            force_rehash()
        return command(*args, **kwargs)

    option = inspect.Parameter("verify", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_OPTION)
    parameters = [*signature.parameters.values(), option]
    verifying.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    verifying.__annotations__ = {each.name: each.annotation for each in parameters}
    return verifying
