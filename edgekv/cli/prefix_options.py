"""The options of a prefix cache, named as TensorRT-LLM names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgekv.errors import UsageError

if TYPE_CHECKING:
    from edgekv.prefix import RetentionPolicy, StoreConfig

SALT_VARIABLE = "EDGEKV_CACHE_SALT"

PrefixCacheOption = Annotated[
    Path | None,
    typer.Option(help="Prefix cache: a folder where computed prefixes are stored for later runs.", show_default=False),
]
CacheSaltOption = Annotated[
    str | None,
    typer.Option(
        help="Share prefixes only with runs of the same salt, which is never written anywhere. With a prefix cache, "
        f"the environment variable {SALT_VARIABLE} is the default.",
        show_default=False,
    ),
]
RetentionOption = Annotated[
    list[str] | None,
    typer.Option(
        help="START-END:PRIORITY or START-END:PRIORITY:MS: keep these prompt tokens with a priority of 0 to 100 "
        "(default 35), for MS milliseconds; END may be left out; repeatable.",
        show_default=False,
    ),
]
DecodePriorityOption = Annotated[
    int | None, typer.Option(help="Priority of generated tokens, 0 to 100.", show_default="35")
]
DecodeDurationOption = Annotated[
    int | None, typer.Option(help="Milliseconds until that priority returns to 35.", show_default=False)
]
TokensPerBlockOption = Annotated[
    int | None, typer.Option(help="Tokens per block of the prefix cache, a power of two.", show_default="32")
]
MaxTokensOption = Annotated[int | None, typer.Option(help="Tokens of the prefix cache in memory.", show_default=False)]
MemoryFractionOption = Annotated[
    float | None,
    typer.Option(
        help="Memory of the prefix cache as a fraction of the free memory, above 0, at most 1.", show_default="256 MiB"
    ),
]
HostSizeOption = Annotated[
    int | None, typer.Option(help="Bytes of memory of the prefix cache beside its other limit.", show_default="0")
]
DiskSizeOption = Annotated[
    int | None,
    typer.Option(help="Bytes of all files in the prefix cache's folder, of all processes.", show_default="1 GiB"),
]
BlockReuseOption = Annotated[
    bool, typer.Option("--enable-block-reuse/--no-block-reuse", help="Whether prefixes are reused at all.")
]
PartialReuseOption = Annotated[
    bool, typer.Option("--enable-partial-reuse/--no-partial-reuse", help="Whether blocks are reused in part.")
]

# More digits than any number of tokens or milliseconds, fewer than Python's limit.
_RANGE = re.compile(r"(\d{1,18})-(\d{0,18}):(\d{1,18})(?::(\d{1,18}))?")


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """The prefix cache's options; None is the default of `StoreConfig`."""

    folder: Path | None
    tokens_per_block: int | None
    max_tokens: int | None
    free_memory_fraction: float | None
    host_cache_size: int | None
    disk_cache_size: int | None
    block_reuse: bool
    partial_reuse: bool

    def config(self) -> StoreConfig | None:
        """The configured store; None if there is none.

        Raises:
            UsageError: a number out of range, or options without a folder.
        """
        from edgekv.prefix import StoreConfig

        sizes = ("tokens_per_block", "max_tokens", "free_memory_fraction", "host_cache_size", "disk_cache_size")
        given = {name: value for name in sizes if (value := getattr(self, name)) is not None}
        if not self.block_reuse:
            return StoreConfig(enable_block_reuse=False)
        if self.folder is None:
            if given or not self.partial_reuse:
                name = next(iter(given), "no_partial_reuse")
                option, fix = f"--{name.replace('_', '-')}", "Add --prefix-cache DIR."
                raise UsageError(option, got="no --prefix-cache", expected="a folder for it", fix=fix)
            return None
        config = StoreConfig(disk_folder=self.folder, enable_partial_reuse=self.partial_reuse)
        return replace(config, **given)


def parse_retention(
    ranges: Sequence[str], decode_priority: int | None, decode_duration_ms: int | None
) -> RetentionPolicy | None:
    """A retention policy as users write it; None if no option is given.

    Raises:
        UsageError: a range that cannot be read, out of range, or two that overlap.
    """
    from edgekv.prefix import RetentionPolicy, TokenRangeRetentionConfig
    from edgekv.prefix.retention import DEFAULT_PRIORITY

    if not ranges and decode_priority is None and decode_duration_ms is None:
        return None
    configs = []
    for text in ranges:
        match = _RANGE.fullmatch(text.strip())
        if match is None:
            wanted = "START-END:PRIORITY or START-END:PRIORITY:MS"
            raise UsageError("--retention", got=repr(text[:80]), expected=wanted, fix="Write 0-448:100, for example.")
        start, end, priority, duration = match.groups()
        configs.append(
            TokenRangeRetentionConfig(
                int(start), int(end) if end else None, int(priority), None if duration is None else int(duration)
            )
        )
    priority_of_decode = DEFAULT_PRIORITY if decode_priority is None else decode_priority
    return RetentionPolicy(tuple(configs), priority_of_decode, decode_duration_ms)
