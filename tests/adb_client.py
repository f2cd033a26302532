"""A stand-in for the program adb: a phone that is a folder, with a shell, exit codes and the faults of real ones.

Run as `adb ARGUMENTS`; the environment's ADB_PHONE names the folder, whose `phone.json` says what the phone is:
`states` by serial number, `properties`, `free_kib`, and optionally `lost_after` and `full_after`, the number of pushes
after which the connection is lost or the storage is full.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

PHONE = Path(os.environ["ADB_PHONE"])
SETTINGS = json.loads((PHONE / "phone.json").read_text())
STORAGE = "/data/local/tmp"


def main(arguments: list[str]) -> int:
    if arguments == ["devices"]:
        print("List of devices attached", *(f"{name}\t{state}" for name, state in SETTINGS["states"].items()), sep="\n")
        return 0
    option, serial, verb, *rest = arguments
    assert option == "-s"
    if SETTINGS["states"].get(serial) != "device" or (PHONE / "lost").exists():
        print(f"error: device '{serial}' not found", file=sys.stderr)
        return 1
    return {"shell": shell, "push": push, "pull": pull}[verb](*rest)


def shell(command: str) -> int:
    """Run a command with the phone's storage in place of its path, and say its paths as the phone would."""
    here = str(PHONE / "root") + STORAGE
    environment = {"PATH": f"{PHONE / 'bin'}:{os.environ['PATH']}", "ADB_PHONE": str(PHONE)}
    run = subprocess.Popen(
        ["sh", "-c", command.replace(STORAGE, here)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert run.stdout is not None
    while chunk := run.stdout.read1():
        sys.stdout.buffer.write(chunk.replace(str(PHONE / "root").encode(), b""))
        sys.stdout.buffer.flush()
    return run.wait()


def push(local: str, remote: str) -> int:
    count = PHONE / "pushes"
    done = int(count.read_text()) if count.exists() else 0
    target = Path(f"{PHONE / 'root'}{remote}")
    if done == SETTINGS.get("lost_after"):
        (PHONE / "lost").touch()
        target.write_bytes(Path(local).read_bytes()[:10])
        print("adb: error: failed to read copy response: EOF", "error: device offline", sep="\n", file=sys.stderr)
        return 1
    if done == SETTINGS.get("full_after"):
        print(f"adb: error: failed to copy '{local}': remote write failed: No space left on device", file=sys.stderr)
        return 1
    count.write_text(str(done + 1))
    if not remote.startswith(STORAGE) or not target.parent.is_dir():
        print(f"adb: error: failed to copy '{local}' to '{remote}': remote Permission denied", file=sys.stderr)
        return 1
    shutil.copyfile(local, target)
    return 0


def pull(remote: str, local: str) -> int:
    source = Path(f"{PHONE / 'root'}{remote}")
    if not source.exists():
        print(f"adb: error: failed to stat remote object '{remote}': No such file or directory", file=sys.stderr)
        return 1
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, local)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
