from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from edgekv.errors import EngineError, UsageError
from edgekv.machine import system
from edgekv.machine.system import (
    MIB,
    format_bytes,
    free_memory_bytes,
    link_or_copy,
    open_regular,
    parse_bytes,
    peak_bytes,
    read_file,
    sha256_of,
)
from edgekv.runtime.mapped import MappedWeights


def test_free_memory_is_what_the_system_reports() -> None:
    assert MIB < free_memory_bytes() < 1 << 50


@pytest.mark.parametrize("sysconf", [None, "raises"])
def test_a_system_that_reports_no_free_memory_is_named(monkeypatch: pytest.MonkeyPatch, sysconf: str | None) -> None:
    """As macOS, which does not know the free pages."""
    monkeypatch.setattr(system, "_proc_bytes", lambda *_: None)
    monkeypatch.setattr(sys, "platform", "win32" if sysconf is None else "darwin")
    if sysconf is None:
        monkeypatch.delattr(os, "sysconf")
    else:
        monkeypatch.setattr(os, "sysconf", _unknown)
    with pytest.raises(EngineError, match=r"free memory: got a system that does not report it \((win32|darwin)\)"):
        free_memory_bytes()


@pytest.mark.parametrize(
    ("free_bytes", "total_bytes", "is_short"), [(24, 100, True), (25, 100, False), (1, None, False)]
)
def test_memory_is_short_below_a_quarter(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, total_bytes: int | None, is_short: bool
) -> None:
    monkeypatch.setattr(system, "free_memory_bytes", lambda: free_bytes)
    monkeypatch.setattr(system, "memory_bytes", lambda: total_bytes)
    assert system.is_short_of_memory() == is_short


@pytest.mark.parametrize("succeeds", [True, False])
def test_windows_is_asked_for_its_memory(monkeypatch: pytest.MonkeyPatch, succeeds: bool) -> None:
    def status(found: object) -> bool:
        structure = found._obj  # type: ignore[attr-defined]
        assert structure.length == ctypes.sizeof(structure) == 64  # MEMORYSTATUSEX
        structure.available = 3 << 30
        return succeeds

    kernel = SimpleNamespace(GlobalMemoryStatusEx=status, GetLastError=lambda: 5)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "name", "nt")
        if succeeds:
            assert free_memory_bytes() == 3 << 30
        else:
            with pytest.raises(EngineError, match="free memory: got error 5 of Windows"):
                free_memory_bytes()


def _unknown(name: str) -> int:
    raise ValueError("unrecognized configuration name")


def test_the_peak_of_a_process_counts_what_it_held_and_gave_back() -> None:
    code = "from edgekv.machine.system import peak_bytes; b = b'x' * (64 << 20); del b; print(peak_bytes())"
    held = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(held.stdout) > 64 * MIB
    assert peak_bytes(os.getppid()) > 0


def test_where_there_is_no_proc_the_peak_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_proc_bytes", lambda *_: None)
    assert peak_bytes() == 0


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4GB", 4 * 10**9), ("4 GiB", 4 << 30), ("1.5g", 1_500_000_000), ("512MiB", 512 << 20), ("7", 7), ("7B", 7)],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_bytes("--max-ram", text) == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "4XB", "four", "1e9", "²MB", "1.", "nan", "iB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--max-ram"):
        parse_bytes("--max-ram", text)


@given(st.integers(0, 1 << 60))
def test_a_size_as_text_is_near_the_size(size_bytes: int) -> None:
    assert parse_bytes("size", format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.06)


def test_regular_files_are_read_up_to_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 1000)
    assert read_file(file, 1000) == b"x" * 1000
    assert sha256_of(file) == hashlib.sha256(b"x" * 1000).hexdigest()
    with pytest.raises(OSError, match=r"file of 1.0 kB, more than the limit of 999 B.*file"):
        read_file(file, 999)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none", 1000)


@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a folder", "a socket"])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    message = r"No such device|not a regular file" if kind == "a socket" else f"{kind}, not a regular file"
    for read in (lambda: read_file(path, MIB), lambda: sha256_of(path), lambda: open_regular(path)):
        with pytest.raises(OSError, match=message):
            read()


def test_a_file_that_says_it_is_empty_has_a_limit_too() -> None:
    """Files of /proc have the size 0."""
    assert read_file(Path("/proc/meminfo"), MIB)
    with pytest.raises(OSError, match="more than the limit of 10 B"):
        read_file(Path("/proc/meminfo"), 10)


@pytest.mark.parametrize("system", ["without hard links", "that refuses them", "with them"])
def test_a_file_is_copied_where_it_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if system == "without hard links":
        monkeypatch.delattr(os, "link")
    elif system == "that refuses them":
        monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "source").write_bytes(b"weights")
    link_or_copy(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"weights"
    assert (tmp_path / "target").samefile(tmp_path / "source") == (system == "with them")


def test_memory_is_released_by_no_library_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """There `CDLL(None)` is a TypeError, and the next step of a session releases idle graphs."""

    def refuse(name: str | None) -> None:
        raise TypeError("bad argument type for built-in operation")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    MappedWeights().release()
    system.return_freed_memory()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells what is mapped")
def test_only_pages_that_nobody_wrote_to_are_given_back(tmp_path: Path) -> None:
    for name in ("read", "written"):
        (tmp_path / name).write_bytes(b"w" * MIB)
    with MappedWeights.within(tmp_path) as weights, ExitStack() as opened:
        files = [opened.enter_context((tmp_path / name).open("r+b")) for name in ("read", "written")]
        read, written = (mmap.mmap(file.fileno(), MIB, access=mmap.ACCESS_COPY) for file in files)
        assert read[MIB // 2] == written[MIB // 2] == ord("w")
        written[0] = ord("x")
    assert [length for places in weights._places.values() for _, length in places] == [MIB]
    weights.release()
    assert (written[0], read[0]) == (ord("x"), ord("w"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep freed memory as they like")
def test_freed_memory_is_returned_to_the_system() -> None:
    program = """
from edgekv.machine.system import return_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1])
texts = [bytes(1000) for _ in range(40000)]
last = texts.pop()  # at the end of the heap: without it the C library would return what is before it
del texts
held = resident()
return_freed_memory()
print(held - resident())
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(found) > 20 * MIB // os.sysconf("SC_PAGE_SIZE")
