"""`edgekv embed`: the embeddings of texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import click
import msgspec

from edgekv.cli.command import command
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output
from edgekv.cli.prompt import read_text
from edgekv.errors import UsageError
from edgekv.option import Option, OptionGroup
from edgekv.runtime.load_options import EngineOptions

TextOption = Annotated[Sequence[str], Option("A text; repeat for several.")]
FileOption = Annotated[Path | None, Option("A UTF-8 file with a text a line; - for standard input.")]
TruncateOption = Annotated[bool, Option("Truncate texts that are too long instead of refusing them.")]

_NPY = ".npy"


@command
def embed(
    bundle: BundleArgument,
    engine: EngineOptions,
    output: Annotated[Output, OptionGroup("Output", only=("is_quiet",))],
    text: TextOption = (),
    file: FileOption = None,
    prompt_name: Annotated[
        str | None,
        Option("Name of the bundle's prompt to put in front of each text, such as query.", shown="the checkpoint's"),
    ] = None,
    dimensions: Annotated[
        int | None, Option("Keep the first N dimensions of each embedding.", minimum=1, shown="all")
    ] = None,
    truncate: TruncateOption = False,
    target: Annotated[
        Path | None,
        Option(
            "A .npy file for the embeddings, float32 [texts, dimensions], instead of standard output.", "-o --output"
        ),
    ] = None,
) -> None:
    """Each text's embedding is a line on standard output, a JSON list of numbers, in the order of the texts."""
    texts = read_texts(text, file)
    if target is not None and target.suffix != _NPY:
        fix = f"Use -o {target.with_suffix(_NPY)}"
        raise UsageError("--output", got=str(target), expected=f"a file that ends with {_NPY}", fix=fix)
    import numpy as np

    from edgekv.loading import open_model  # imports the runtime, which --help does not need
    from edgekv.machine.scratch import atomic_file

    with open_model(bundle, engine) as model:
        vectors = model.embed(texts, prompt_name=prompt_name, dimensions=dimensions, truncate=truncate)
    if target is None:
        for vector in vectors:
            click.echo(msgspec.json.encode(vector.tolist()))
        return
    try:
        with atomic_file(target) as partial, partial.open("wb") as opened:
            np.save(opened, vectors)
    except OSError as error:
        writable = "a file that can be written"
        raise UsageError(str(target), got=error.strerror, expected=writable, fix="Choose another place.") from None
    output.note(f"[{len(vectors)} embeddings of {vectors.shape[1]} elements in {target}]")


def read_texts(text: Sequence[str], file: Path | None) -> list[str]:
    """The texts.

    Raises:
        UsageError: none or both kinds are given, or a file that is unreadable, too large, not UTF-8 or empty.
    """
    if bool(text) == (file is not None):
        sources = "both" if text else "neither"
        raise UsageError("--text, --file", got=sources, expected="one of them", fix="Give one.")
    if file is None:
        return [*text]
    lines = read_text(str(file), "--file").splitlines()
    if not lines:
        raise UsageError("--file", got=f"{file}: no line", expected="a text a line", fix="Give some text.")
    return lines
