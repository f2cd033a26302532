"""Prefixes in a bundle's folder, baked by processes that die or come at the same time."""

from __future__ import annotations

import errno
import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgekv.errors import BundleError, UsageError
from edgekv.machine.tensor_file import decode_tensors, encode_tensors
from edgekv.prefix import PrefixStore, StoreConfig, add_baked, baked as baked_module, baked_prefixes, remove_baked
from edgekv.prefix.baked import load_baked, locked
from tests.support.prefix_cases import GEOMETRY, Tokens, fetch, rows_of, source
from tests.support.thorough import variants

ROOT = Path(__file__).parents[3]
CHILD = """
import sys
from pathlib import Path
from tests.edgekv.prefix.test_prefix_baked import bake, die_at_step
if len(sys.argv) > 3:
    die_at_step(int(sys.argv[3]))
bake(Path(sys.argv[1]), sys.argv[2])
"""
KILLED = -signal.SIGKILL if hasattr(signal, "SIGKILL") else -9


def store_of() -> PrefixStore:
    return PrefixStore(GEOMETRY, StoreConfig(tokens_per_block=32), fingerprint="weights")


def sequence(name: str) -> Tokens:
    return tuple(name.encode()) * 9


def bake(bundle: Path, name: str) -> None:
    store = store_of()
    store.insert(sequence(name), source(sequence(name)), ended=True)
    add_baked(bundle, name, "cpu", sequence(name), store)


def die_at_step(number: int) -> None:
    """Let this process be killed in its `number`-th change of the file system."""
    import os

    steps = iter(range(number))

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir")) and next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def test_an_endless_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prefixes").mkdir()
    (tmp_path / "prefixes" / "prefixes.json").symlink_to("/dev/zero")
    with pytest.raises(BundleError, match=r"prefixes\.json: got a device, not a regular file; expected the record"):
        baked_prefixes(tmp_path)


def run(bundle: Path, *arguments: str) -> int:
    return subprocess.run([sys.executable, "-c", CHILD, str(bundle), *arguments], cwd=ROOT, check=False).returncode


def check(bundle: Path) -> list[str]:
    """Names of the prefixes, each of which is whole."""
    store = store_of()
    names = [each.name for each in baked_prefixes(bundle)]
    opened: Any = SimpleNamespace(path=bundle)
    load_baked(opened, store, "cpu")
    for name in names:
        match = store.match(sequence(name))
        assert match.tokens == len(sequence(name))
        np.testing.assert_array_equal(fetch(store, match)[0], rows_of(sequence(name)))

    return names


@pytest.mark.slow
@pytest.mark.parametrize("name", variants(["third", "first"], ["first"]))
def test_a_bake_that_is_killed_at_any_step_loses_nothing(tmp_path: Path, name: str) -> None:
    """A new prefix, and one that replaces another of its name."""
    for each in ("first", "second"):
        bake(tmp_path, each)
    code, step = KILLED, 0
    while code == KILLED:
        code = run(tmp_path, name, str(step))
        found = check(tmp_path)
        assert set(found) - {name} == {"first", "second"} - {name}
        if name == "first":
            assert "first" in found
        step += 1
    assert code == 0
    assert step > 4
    assert name in check(tmp_path)
    left = {path.name for path in (tmp_path / "prefixes").iterdir()}
    assert left == {".lock", "prefixes.json", *(each.file for each in baked_prefixes(tmp_path))}


@pytest.mark.slow
def test_bakes_at_once_all_stay(tmp_path: Path) -> None:
    names = [f"prefix-{n}" for n in range(4)]
    script = """
import sys
from pathlib import Path
from tests.edgekv.prefix.test_prefix_baked import bake
for n in range(4):
    bake(Path(sys.argv[1]), f"{sys.argv[2]}-{n}")
"""
    writers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), name], cwd=ROOT) for name in names]
    assert [writer.wait() for writer in writers] == [0] * len(names)
    assert sorted(check(tmp_path)) == sorted(f"{name}-{n}" for name in names for n in range(4))


def test_a_removed_prefix_leaves_the_others(tmp_path: Path) -> None:
    for each in ("first", "second"):
        bake(tmp_path, each)
    assert [each.name for each in remove_baked(tmp_path, "first")] == ["first"]
    assert check(tmp_path) == ["second"]
    assert len(list((tmp_path / "prefixes").glob("*.safetensors"))) == 1


def test_removing_an_unknown_prefix_names_those_that_there_are(tmp_path: Path) -> None:
    bake(tmp_path, "first")
    with pytest.raises(UsageError, match=r"got 'second' on htp; expected one of first \(cpu\)\. See edgekv prefix ls"):
        remove_baked(tmp_path, "second", "htp")


def test_files_of_others_stay(tmp_path: Path) -> None:
    bake(tmp_path, "one")
    for name in ("README.md", "notes.safetensors", ".hidden"):
        (tmp_path / "prefixes" / name).write_text("the user's own")
    bake(tmp_path, "two")
    remove_baked(tmp_path, "one")
    held = {path.name for path in (tmp_path / "prefixes").iterdir()}
    assert {"README.md", "notes.safetensors", ".hidden"} <= held
    assert len([name for name in held if name.endswith("two-cpu.safetensors")]) == 1
    assert not [name for name in held if name.endswith("one-cpu.safetensors")]


def forge(bundle: Path, **changed: Any) -> None:
    """Replace tensors of a prefix, with the record and hash that belong to them."""
    file = bundle / "prefixes" / baked_prefixes(bundle)[0].file
    content = encode_tensors({**decode_tensors(file.read_bytes()).arrays, **changed})
    file.write_bytes(content)
    path = bundle / "prefixes" / "prefixes.json"
    record = json.loads(path.read_bytes())
    record["prefixes"][0] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokens", lambda held: held.astype(np.float32), "tokens: got float32"),
        ("tokens", lambda held: held[:-1], "tokens: got int64"),
        ("tokens", lambda held: -1 - held, "ids from 0 to 4294967295"),
        ("tokens", lambda held: held + (1 << 32), "ids from 0 to 4294967295"),
        ("tokens", lambda held: held.reshape(1, -1), "tokens: got int64"),
        ("rows", lambda held: held.astype(np.int16), "group 0: got int16"),
        ("rows", lambda held: held[..., :-1], "group 0: got uint8"),
        ("rows", lambda held: held[:, :-1], "group 0: got uint8"),
        ("rows", lambda held: held.ravel(), "group 0: got uint8"),
        ("rows", lambda held: held[:-1], "group 0: got uint8"),
    ],
)
def test_forged_rows_and_tokens_are_refused(tmp_path: Path, name: str, change: Any, message: str) -> None:
    bake(tmp_path, "one")
    file = tmp_path / "prefixes" / baked_prefixes(tmp_path)[0].file
    held = decode_tensors(file.read_bytes()).arrays
    key = next(each for each in held if (each == "tokens") == (name == "tokens"))
    forge(tmp_path, **{key: np.ascontiguousarray(change(held[key]))})
    opened: Any = SimpleNamespace(path=tmp_path)
    with pytest.raises(BundleError, match=message):
        load_baked(opened, store_of(), "cpu")


@pytest.mark.parametrize("file", ["a\0b", "../x", "sub/x", "", "."])
def test_forged_names_are_refused(tmp_path: Path, file: str) -> None:
    bake(tmp_path, "one")
    path = tmp_path / "prefixes" / "prefixes.json"
    record = json.loads(path.read_bytes())
    record["prefixes"][0]["file"] = file
    path.write_text(json.dumps(record))
    with pytest.raises(BundleError, match="a file in the folder"):
        baked_prefixes(tmp_path)


def test_a_lock_that_is_held_for_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baked_module, "_LONGEST_WAIT_S", 0.1)
    with locked(tmp_path / "lock"):
        with pytest.raises(OSError, match="another process may hold its lock") as caught, locked(tmp_path / "lock"):
            pass
        assert caught.value.errno == errno.EAGAIN
    with locked(tmp_path / "lock"):
        pass
