"""`edgekv push` and `edgekv run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click

from edgekv.cli.command import command
from edgekv.cli.output import Output, print_json
from edgekv.errors import BundleError
from edgekv.machine.system import format_bytes
from edgekv.option import Argument, Option
from exporters.cli.next_step import next_command
from exporters.progress import progress_bars


@dataclass(frozen=True, slots=True)
class PhoneOptions:
    """Which phone, and what goes where on it."""

    serial: Annotated[str | None, Option("Serial number of the phone, if several are connected.")] = None
    to: Annotated[str, Option("A folder of the phone from which programs may start.")] = "/data/local/tmp/edgekv"
    qairt: Annotated[
        Sequence[Path],
        Option(
            "Folder of the Qualcomm AI Runtime SDK, or an .aar file; repeat for several.",
            shown="QAIRT_SDK_ROOT or QNN_SDK_ROOT",
        ),
    ] = ()
    chip: Annotated[str | None, Option("The phone's chip, for phones before Android 12, which do not say it.")] = None


@command
def push(
    path: Annotated[Path, Argument("A folder that `edgekv bundle genie` wrote, or a bundle.")],
    phone: PhoneOptions,
    output: Output,
) -> None:
    """The libraries that Genie needs there are copied too. Only files that changed are copied. Chip, libraries and free
    space are checked first.
    """
    from exporters.targets.android.adb import Adb
    from exporters.targets.android.push import deploy, open_payload

    payload = open_payload(path)
    adb = Adb.connect(phone.serial)
    with progress_bars(output.is_quiet) as progress:
        done = deploy(adb, payload, phone.to, qairt=phone.qairt, chip=phone.chip, progress=progress)
    pushes = {"files": done.files} | ({"libraries": done.libraries} if done.libraries is not None else {})
    if output.as_json:
        what = {
            name: {
                "copied": list(pushed.files),
                "kept": pushed.kept,
                "removed": pushed.stale,
                "copied_bytes": pushed.bytes,
            }
            for name, pushed in pushes.items()
        }
        print_json({"phone": done.phone, "place": done.place, **what})
        return
    click.echo(f"{done.phone.name}, {payload.soc}, Android {done.phone.android}: {done.place.folder}")
    for name, pushed in pushes.items():
        gone = f", {len(pushed.stale)} removed" if pushed.stale else ""
        copied = f"{len(pushed.files)} copied ({format_bytes(pushed.bytes)})"
        click.echo(f"  {name}: {copied}, {len(pushed.kept)} there already{gone}")
    if payload.genie is not None:
        click.echo(next_command("run", path, "--on adb"))


@command
def run(
    path: Annotated[Path, Argument("A folder that `edgekv bundle genie` wrote.")],
    on: Annotated[Literal["adb"], Option("Where to run: an Android phone.")],
    prompt: Annotated[str, Option("The text to continue.")],
    phone: PhoneOptions,
    output: Output,
    max_new_tokens: Annotated[
        int | None, Option("Maximum number of new tokens.", shown="the configuration's", minimum=1)
    ] = None,
    trace: Annotated[
        Path | None,
        Option("Write keys, values and logits of the prompt's first tokens as .npz, for `edgekv diff`."),
    ] = None,
) -> None:
    """What is missing on the phone is pushed first, as by `edgekv push`."""
    from exporters.targets.android.adb import Adb
    from exporters.targets.android.push import deploy, open_payload
    from exporters.targets.android.run import run_on_phone

    payload = open_payload(path)
    if payload.genie is None:
        fix = f"Write the folder first: edgekv bundle genie {path} -o DIR"
        raise BundleError(str(path), got="a bundle", expected="a folder that Genie runs", fix=fix)
    text = payload.genie.query(prompt)
    adb = Adb.connect(phone.serial)
    with progress_bars(output.is_quiet) as progress:
        done = deploy(adb, payload, phone.to, qairt=phone.qairt, chip=phone.chip, progress=progress)
    pieces: list[str] = []

    def take(piece: str) -> None:
        pieces.append(piece)
        if not output.as_json:
            click.echo(piece, nl=False)

    speed = run_on_phone(adb, done.place, payload.genie, text, take, max_new_tokens=max_new_tokens, trace=trace)
    if output.as_json:
        print_json({"text": "".join(pieces), "stats": speed})
        return
    click.echo()
    output.note(
        f"[{done.phone.name}: {speed.prompt_tokens} + {speed.new_tokens} tokens; loaded in {speed.load_ms:,.0f} ms, "
        f"first token {speed.first_token_ms:,.0f} ms, prefill {speed.prompt_tokens_per_s:,.1f} tokens/s, decode "
        f"{speed.new_tokens_per_s:,.1f} tokens/s]"
    )
