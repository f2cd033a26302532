"""A stand-in for the program adb: a phone that is a folder, with a shell, exit codes and the faults of real ones.

Run as `adb ARGUMENTS`; the environment's ADB_PHONE names the folder, whose file `settings` says what the phone is:
`states` by serial number, `properties`, `free_kib`, and optionally `lost_after` and `full_after`, the number of pushes
after which the connection is lost or the storage is full.
"""

from __future__ import annotations

import marshal
import os
import sys

# It starts a dozen times for each push: `json`, `shutil`, `subprocess` and `pathlib` would be most of that.
PHONE = os.environ["ADB_PHONE"]
ROOT = f"{PHONE}/root"
STORAGE = "/data/local/tmp"
with open(f"{PHONE}/settings", "rb") as _file:
    SETTINGS = marshal.load(_file)


def main(arguments: list[str]) -> int:
    if arguments == ["devices"]:
        print("List of devices attached", *(f"{name}\t{state}" for name, state in SETTINGS["states"].items()), sep="\n")
        return 0
    option, serial, verb, *rest = arguments
    assert option == "-s"
    if SETTINGS["states"].get(serial) != "device" or os.path.exists(f"{PHONE}/lost"):
        print(f"error: device '{serial}' not found", file=sys.stderr)
        return 1
    return {"shell": shell, "push": push, "pull": pull}[verb](*rest)


def shell(command: str) -> int:
    """Run a command with the phone's storage in place of its path, and say its paths as the phone would."""
    reading, writing = os.pipe()
    child = os.posix_spawn(
        "/bin/sh",
        ["sh", "-c", command.replace(STORAGE, ROOT + STORAGE)],
        {"PATH": f"{PHONE}/bin:{os.environ['PATH']}", "ADB_PHONE": PHONE},
        file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1), (os.POSIX_SPAWN_DUP2, writing, 2)],
    )
    os.close(writing)
    while chunk := os.read(reading, 1 << 16):
        os.write(1, chunk.replace(ROOT.encode(), b""))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def push(local: str, remote: str) -> int:
    count, target = f"{PHONE}/pushes", ROOT + remote
    done = int(_read(count)) if os.path.exists(count) else 0
    if done == SETTINGS.get("lost_after"):
        _write(f"{PHONE}/lost", b"")
        _write(target, _read(local)[:10])
        print("adb: error: failed to read copy response: EOF", "error: device offline", sep="\n", file=sys.stderr)
        return 1
    if done == SETTINGS.get("full_after"):
        print(f"adb: error: failed to copy '{local}': remote write failed: No space left on device", file=sys.stderr)
        return 1
    _write(count, str(done + 1).encode())
    if not remote.startswith(STORAGE) or not os.path.isdir(os.path.dirname(target)):
        print(f"adb: error: failed to copy '{local}' to '{remote}': remote Permission denied", file=sys.stderr)
        return 1
    if os.path.isdir(local):
        import shutil

        shutil.copytree(local, target)
    else:
        _write(target, _read(local))
    return 0


def pull(remote: str, local: str) -> int:
    import shutil

    source = ROOT + remote
    if not os.path.exists(source):
        print(f"adb: error: failed to stat remote object '{remote}': No such file or directory", file=sys.stderr)
        return 1
    (shutil.copytree if os.path.isdir(source) else shutil.copyfile)(source, local)
    return 0


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
