"""The child process of `edgekv.doctor.examine`: runs one probe and replies with its finding."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import msgspec

from edgekv.doctor.finding import Finding, NotInstalledError
from edgekv.errors import EdgeKVError


def main() -> None:
    point = metadata.EntryPoint(name="probe", value=sys.stdin.read(), group="")
    try:
        finding = point.load()()
    except NotInstalledError as error:
        finding = Finding(status="missing", detail="not installed", fix=error.fix)
    except EdgeKVError as error:
        finding = Finding.of(error)
    except Exception as error:  # a foreign package may raise anything
        detail = f"{type(error).__name__}: {' '.join(str(error).split())}"
        finding = Finding(status="broken", detail=detail, fix="Install the versions that edgekv asks for.")
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(finding))


if __name__ == "__main__":
    main()
