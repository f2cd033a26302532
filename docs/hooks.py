"""Pages of the site that are written elsewhere: commands by --help, DecoderSpec by its docstring, files of the root."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import click
import msgspec
from griffe import Docstring, DocstringSectionAttributes
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from edgekv.cli.app import program
from edgekv.spec import Convolution, DecoderSpec
from edgekv.spec.decoder import SplitChannel
from edgekv.spec.rope import Rope

WIDTH = 100


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs when it has listed the pages."""
    pages = {"reference/commands.md": commands_page(), "reference/decoder-spec.md": decoder_page()}
    for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG"):
        text = Path(config.config_file_path).with_name(f"{name}.md").read_text("utf-8")
        pages[f"project/{name.lower()}.md"] = text.replace("](docs/", "](../")
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def commands_page() -> str:
    """`--help` of every command."""
    introduction = "# Commands\n\nWhat `--help` of each command prints.\n\n"
    with click.Context(program, info_name="edgekv", max_content_width=WIDTH, terminal_width=WIDTH) as context:
        return introduction + "\n".join(_help(program, context))


def _help(command: click.Command, context: click.Context) -> Iterator[str]:
    depth = context.command_path.count(" ") + 1
    if depth > 1:
        yield f"{'#' * depth} {context.command_path}\n"
    yield f"```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if (found := command.get_command(context, name)) is not None:
                with click.Context(found, parent=context, info_name=name) as inner:
                    yield from _help(found, inner)


def decoder_page() -> str:
    """The fields of DecoderSpec, and of the records in it."""
    introduction = (
        "# DecoderSpec\n\n"
        "How a decoder differs from Llama's. [A family's file](architectures.md#adding-an-architecture) makes it from "
        "`config.json`, and `model` in a bundle's manifest holds it.\n"
    )
    return "\n".join([introduction, *map(_table, (DecoderSpec, Rope, Convolution, SplitChannel))])


def _table(kind: type[msgspec.Struct]) -> str:
    described = _attributes(kind)
    lines = [f"## {kind.__name__}\n", f"{inspect.getdoc(kind) or ''}\n".partition("\nAttributes:")[0]]
    lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        default = "required" if field.required else f"`{field.default!r}`"
        cells = (f"`{field.name}`", f"`{_type(kind, field.name)}`", default, described.get(field.name, ""))
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _attributes(kind: type) -> dict[str, str]:
    sections = Docstring(inspect.getdoc(kind) or "", parser="google").parse(warnings=False)
    found = (section for section in sections if isinstance(section, DocstringSectionAttributes))
    return {each.name: re.sub(r"\s+", " ", each.description) for section in found for each in section.value}


def _type(kind: type, name: str) -> str:
    """The annotation as it is written, with the values of a Literal, without the limits that msgspec checks."""
    written = next(base.__annotations__[name] for base in kind.__mro__ if name in getattr(base, "__annotations__", {}))
    names = vars(sys.modules[kind.__module__])

    def expand(match: re.Match[str]) -> str:
        meant = names.get(match[0])
        if get_origin(meant) is Literal:
            return " | ".join(map(repr, get_args(meant)))
        return get_args(meant)[0].__name__ if get_origin(meant) is Annotated else match[0]

    return re.sub(r"\w+", expand, re.sub(r"Annotated\[(\w+), .*\]", r"\1", str(written)))
