"""Options that constrain the text: a JSON schema, a regular expression or a Lark grammar."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edgekv.errors import UsageError
from edgekv.machine.system import read_file
from edgekv.option import Option

if TYPE_CHECKING:
    from edgekv.text import Grammar


@dataclass(frozen=True, slots=True)
class ConstraintOptions:
    """What the text has to be."""

    json_schema: Annotated[
        str | None, Option("Constrain the text to JSON of this schema, given as JSON or as a file.")
    ] = None
    grammar: Annotated[Path | None, Option("Constrain the text to the Lark grammar in this file.")] = None
    regex: Annotated[str | None, Option("Constrain the whole text to this regular expression.")] = None

    def read(self) -> Grammar | None:
        """The constraint; None for none.

        Raises:
            UsageError: several options, a file that cannot be read, or a constraint that is wrong.
        """
        sources = {"--json-schema": self.json_schema, "--grammar": self.grammar, "--regex": self.regex}
        names = [name for name, value in sources.items() if value is not None]
        if len(names) > 1:
            raise UsageError(", ".join(sources), got=" and ".join(names), expected="one of them", fix="Give one.")
        from edgekv.text import Grammar  # slow to import

        if self.json_schema is not None:
            text = self.json_schema
            is_text = text.lstrip()[:1] in ("{", "") or text in ("true", "false")
            return Grammar.json_schema(text if is_text else _read("--json-schema", Path(text)))
        if self.grammar is not None:
            return Grammar.lark(_read("--grammar", self.grammar))
        return None if self.regex is None else Grammar.regex(self.regex)


def _read(option: str, path: Path) -> str:
    from edgekv.text.grammar import MAX_GRAMMAR_BYTES

    try:
        return read_file(path, MAX_GRAMMAR_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        expected = f"a UTF-8 file of at most {MAX_GRAMMAR_BYTES:,} bytes"
        raise UsageError(option, got=f"{path}: {error}", expected=expected, fix="Check the path.") from None
