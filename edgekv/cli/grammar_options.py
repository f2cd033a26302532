"""Options that constrain the text: a JSON schema, a regular expression or a Lark grammar."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgekv.errors import UsageError
from edgekv.system import read_file

if TYPE_CHECKING:
    from edgekv.text.grammar import Grammar

JsonSchemaOption = Annotated[
    str | None,
    typer.Option(help="The text is JSON of this schema: JSON text, or a file with it.", show_default=False),
]
GrammarOption = Annotated[
    Path | None, typer.Option("--grammar", help="The text is one of the Lark grammar in this file.", show_default=False)
]
RegexOption = Annotated[
    str | None, typer.Option(help="This regular expression matches the whole text.", show_default=False)
]


def parse_grammar(json_schema: str | None, grammar: Path | None, regex: str | None) -> Grammar | None:
    """The constraint that the options name; None for none.

    Raises:
        UsageError: several options, a file that cannot be read, or a constraint that is wrong.
    """
    given = {"--json-schema": json_schema, "--grammar": grammar, "--regex": regex}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UsageError(", ".join(given), got=" and ".join(names), expected="one of them", fix="Give one.")
    if not names:
        return None
    from edgekv.text.grammar import Grammar  # imports the runtime, which --help does not need

    if json_schema is not None:
        is_text = json_schema.lstrip()[:1] in ("{", "") or json_schema in ("true", "false")
        return Grammar.json_schema(json_schema if is_text else _read("--json-schema", Path(json_schema)))
    if grammar is not None:
        return Grammar.lark(_read("--grammar", grammar))
    assert regex is not None
    return Grammar.regex(regex)


def _read(option: str, path: Path) -> str:
    from edgekv.text.grammar import MAX_GRAMMAR_BYTES

    try:
        return read_file(path, MAX_GRAMMAR_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        wanted = f"a UTF-8 file of at most {MAX_GRAMMAR_BYTES:,} bytes"
        raise UsageError(option, got=f"{path}: {error}", expected=wanted, fix="Check the path.") from None
