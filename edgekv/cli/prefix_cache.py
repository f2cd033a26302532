"""The prefix cache of `edgekv generate`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

from edgekv.cli.command import OptionValues
from edgekv.errors import UsageError
from edgekv.option import Option
from edgekv.prefix import StoreConfig

if TYPE_CHECKING:
    from edgekv.model import Model

SALT_VARIABLE = "EDGEKV_CACHE_SALT"


SaltOption = Annotated[
    str | None,
    Option(
        "Share prefixes only with runs of the same salt, which is never written anywhere.",
        shown=f"{SALT_VARIABLE}, with --prefix-cache",
        group="Prefix cache",
    ),
]


def store_config(options: OptionValues[StoreConfig]) -> StoreConfig | None:
    """The configured store; None if there is none.

    Raises:
        UsageError: a number out of range, or options without a folder.
    """
    if options.get("enable_block_reuse") is False:
        return StoreConfig(enable_block_reuse=False)
    values = {name: value for name, value in options.items() if name != "enable_block_reuse"}
    if values and "disk_folder" not in values:
        fix = "Add --prefix-cache DIR."
        raise UsageError(next(iter(values)), got="no --prefix-cache", expected="a folder for it", fix=fix)
    return StoreConfig(**values) if values else None


def salt_of(salt: str | None, model: Model) -> str | None:
    """The salt of the prompts; that of the environment is for prefix caches alone."""
    if salt is not None or model.prefix_store is None:
        return salt
    return os.environ.get(SALT_VARIABLE) or None
