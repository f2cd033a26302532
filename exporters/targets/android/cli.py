"""`edgekv push` and `edgekv run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

from edgekv.cli.output import print_json
from edgekv.errors import BundleError
from edgekv.system import format_bytes
from exporters.progress import shown
from exporters.targets.genie.cli import check_new_tokens

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)

SerialOption = Annotated[Optional[str], typer.Option(help="Serial number of the phone, if several are connected.")]
FolderOption = Annotated[str, typer.Option("--to", help="A folder of the phone from which programs may start.")]
QairtOption = Annotated[
    Optional[list[Path]],
    typer.Option(
        help="Folder of the Qualcomm AI Runtime SDK, or an .aar file; may be repeated. Default: QAIRT_SDK_ROOT or "
        "QNN_SDK_ROOT."
    ),
]
ChipOption = Annotated[
    Optional[str], typer.Option(help="The phone's chip, for phones before Android 12, which do not say it.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
_FOLDER = "/data/local/tmp/edgekv"


def push(
    path: Annotated[Path, typer.Argument(help="A folder that `edgekv bundle genie` wrote, or a bundle.")],
    serial: SerialOption = None,
    to: FolderOption = _FOLDER,
    qairt: QairtOption = None,
    chip: ChipOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a folder to an Android phone over adb, with the libraries that Genie needs there.

    Only files that changed are copied. Chip, libraries and free space are checked first.
    """
    from exporters.targets.android.adb import Adb
    from exporters.targets.android.deploy import deploy
    from exporters.targets.android.payload import open_payload

    payload = open_payload(path)
    adb = Adb.connect(serial)
    with shown() as progress:
        done = deploy(adb, payload, to, qairt=qairt or [], chip=chip, progress=progress)
    pushes = {"files": done.files} | ({"libraries": done.libraries} if done.libraries is not None else {})
    if as_json:
        what = {
            name: {"copied": list(each.files), "kept": each.kept, "removed": each.stale, "copied_bytes": each.bytes}
            for name, each in pushes.items()
        }
        print_json({"phone": done.phone, "place": done.place, **what})
        return
    typer.echo(f"{done.phone.name}, {payload.soc}, Android {done.phone.android}: {done.place.folder}")
    for name, each in pushes.items():
        gone = f", {len(each.stale)} removed" if each.stale else ""
        copied = f"{len(each.files)} copied ({format_bytes(each.bytes)})"
        typer.echo(f"  {name}: {copied}, {len(each.kept)} there already{gone}")


def run(
    path: Annotated[Path, typer.Argument(help="A folder that `edgekv bundle genie` wrote.")],
    on: Annotated[Literal["adb"], typer.Option(help="Where to run: `adb`, an Android phone.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_new_tokens: Annotated[
        Optional[int], typer.Option(help="Maximum number of new tokens. Default: the configuration's.")
    ] = None,
    trace: Annotated[
        Optional[Path],
        typer.Option(help="Write keys, values and logits of the prompt's first tokens as .npz, for `edgekv diff`."),
    ] = None,
    serial: SerialOption = None,
    to: FolderOption = _FOLDER,
    qairt: QairtOption = None,
    chip: ChipOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt in Genie on a phone. What is missing there is pushed first, as by `edgekv push`."""
    from exporters.targets.android.adb import Adb
    from exporters.targets.android.deploy import deploy
    from exporters.targets.android.payload import open_payload
    from exporters.targets.android.run import run_on_phone

    check_new_tokens(max_new_tokens)
    payload = open_payload(path)
    if payload.genie is None:
        fix = f"Write the folder first: edgekv bundle genie {path} -o DIR"
        raise BundleError(str(path), got="a bundle", expected="a folder that Genie runs", fix=fix)
    text = payload.genie.query(prompt)
    adb = Adb.connect(serial)
    with shown() as progress:
        done = deploy(adb, payload, to, qairt=qairt or [], chip=chip, progress=progress)
    pieces: list[str] = []

    def take(piece: str) -> None:
        pieces.append(piece)
        if not as_json:
            typer.echo(piece, nl=False)

    speed = run_on_phone(adb, done.place, payload.genie, text, take, max_new_tokens=max_new_tokens, trace=trace)
    if as_json:
        print_json({"text": "".join(pieces), "stats": speed})
        return
    typer.echo()
    typer.echo(
        f"[{done.phone.name}: {speed.prompt_tokens} + {speed.new_tokens} tokens; loaded in {speed.load_ms:,.0f} ms, "
        f"first token {speed.first_token_ms:,.0f} ms, prefill {speed.prompt_tokens_per_s:,.1f} tokens/s, decode "
        f"{speed.new_tokens_per_s:,.1f} tokens/s]",
        err=True,
    )
