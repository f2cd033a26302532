"""A cache in memory that the processor and the HTP share."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from devices import find
from edgekv.bundle import open_bundle
from edgekv.engine import CacheSetup
from edgekv.errors import UsageError
from edgekv.kv import Allocation, Growth, KVCache
from edgekv.kv.memory import HeapMemory
from edgekv.qnn.options import HtpOptions
from edgekv.qnn.vendor_libraries import Platform, rpc_memory
from edgekv.runtime import HtpEngine
from edgekv.runtime.htp import takes_shared_memory
from edgekv.runtime.load_options import CacheOptions
from edgekv.spec.geometry import RowSpec

CHIP = find("SM8650")
BOARD = Platform("linux", "arm64")
_STEP = """
import ctypes, gc, sys
from pathlib import Path
import numpy
from devices import find
from edgekv.bundle import open_bundle
from edgekv.runtime import HtpEngine
from edgekv.kv.memory import aligned_zeros
from edgekv.engine import CacheSetup
from edgekv.runtime.load_options import CacheOptions

rpc = ctypes.CDLL("libcdsprpc.so")
count = lambda name: ctypes.c_int.in_dll(rpc, name).value
bundle = open_bundle(Path(sys.argv[1]))
engine = HtpEngine.on(find("SM8650"), bundle).sharing()
cache = CacheSetup.read(bundle, engine, CacheOptions()).make()
print(count("allocated"), count("freed"))
print(all(engine.shared.holds(address) for address in cache.arena.addresses), engine.shared.holds(0))
print(all(address % 64 == 0 for address in cache.arena.addresses), (cache.arena.array == 128).all())
binding = engine.load(engine.first, "decode")
arena, window = cache.arena, cache.window(1, bundle.manifest.graphs[0].context)[0]
binding.inputs([t.past for t in arena.tensors], arena.dtype, arena.past_shape(window.columns), arena.addresses)
binding.outputs([t.new for t in arena.tensors], arena.dtype, arena.new_shape(1), arena.new_addresses(window))
rest = [port for port in binding.interface.inputs if not port.name.startswith("past_")]
rest_out = [port for port in binding.interface.outputs if not port.name.startswith("past_")]
kept = {port.name: aligned_zeros(port.shape, port.dtype) for port in (*rest, *rest_out)}
for bind, ports in ((binding.inputs, rest), (binding.outputs, rest_out)):
    for port in ports:
        bind([port.name], numpy.dtype(port.dtype), port.shape, [kept[port.name].ctypes.data])
try:
    binding.run()
except Exception as error:
    print("memRegister" in str(error))
del cache, arena, binding
gc.collect()
print(count("allocated"), count("freed"))
"""


class Counting:
    """Ordinary memory that is counted."""

    def __init__(self) -> None:
        self.made: list[HeapMemory] = []

    def __call__(self, size_bytes: int) -> HeapMemory:
        self.made.append(HeapMemory(size_bytes))
        return self.made[-1]


@pytest.mark.parametrize("strategy", ["slot", "shift-concat", "pointer-shift"])
@pytest.mark.parametrize("key_layout", ["rows", "columns"])
def test_a_cache_is_where_its_allocator_says(strategy: str, key_layout: str) -> None:
    geometry = RowSpec(layers=2, kv_heads=2, head_dim=64, window=32, kv_dtype="u8", key_layout=key_layout)
    allocate = Counting()
    cache = KVCache(geometry, ar=[1, 4], strategy=strategy, allocation=Allocation(allocate=allocate))
    ranges = [(memory.address, memory.address + memory.held_bytes) for memory in allocate.made]
    assert len(ranges) == len(cache.arenas)
    for arena, (first, end) in zip(cache.arenas, ranges, strict=True):
        assert all(first <= address < end and address % 64 == 0 for address in arena.addresses)


def test_memory_that_grows_is_from_the_allocator_too() -> None:
    geometry = RowSpec(layers=2, kv_heads=1, head_dim=64, window=64, kv_dtype="u8")
    allocate = Counting()
    cache = KVCache(geometry, ar=[1], strategy="slot", allocation=Allocation(Growth((32, 64), "together"), allocate))
    before = len(allocate.made)
    for _ in range(40):
        cache.window(1, 64)
        cache.commit(1)
    assert before == 2 and len(allocate.made) == 4


@pytest.mark.htp
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_provider_allocates_registers_and_frees(small_export: Path, tmp_path: Path) -> None:
    """The emulator has no memory to share: that it is asked to register an address shows what the provider was told."""
    source = Path(__file__).with_name("libcdsprpc.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libcdsprpc.so"), str(source)], check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", _STEP, str(small_export)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.splitlines() == ["1 0", "True False", "True True", "True", "1 1"], done.stderr


def test_what_was_asked_for_and_is_missing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, auto = HtpOptions(shared_memory=True), HtpOptions.parse("shared-memory=auto")
    with pytest.raises(UsageError, match=r"htp shared-memory: got no library of FastRPC \(libcdsprpc\)"):
        takes_shared_memory(asked, BOARD, has_binaries=True)
    assert not takes_shared_memory(auto, BOARD, has_binaries=True)
    monkeypatch.setattr("edgekv.runtime.htp.has_rpc_memory", lambda on: True)
    with pytest.raises(UsageError, match=r"htp shared-memory: got only a binary of several graphs"):
        takes_shared_memory(asked, BOARD, has_binaries=False)
    assert takes_shared_memory(asked, BOARD, has_binaries=True)
    assert takes_shared_memory(auto, BOARD, has_binaries=True)
    assert not takes_shared_memory(auto, BOARD, has_binaries=False)
    assert not takes_shared_memory(auto, Platform("linux", "x86_64"), has_binaries=True)
    assert not takes_shared_memory(HtpOptions(), BOARD, has_binaries=True)


def test_strategies_whose_addresses_move_are_refused(small_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(small_export)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr("edgekv.runtime.htp.has_rpc_memory", lambda on: True)
    engine = HtpEngine(CHIP).with_options(HtpOptions(shared_memory=True))
    with pytest.raises(UsageError, match=r"htp shared-memory: got yes with the update strategy mirror; expected slot"):
        CacheSetup.read(bundle, engine, CacheOptions(kv_update="mirror"))
    assert CacheSetup.read(bundle, engine, CacheOptions()).allocation.allocate is engine.shared
    auto = HtpEngine(CHIP).with_options(HtpOptions(shared_memory="auto"))
    assert CacheSetup.read(bundle, auto, CacheOptions(kv_update="mirror")).allocation.allocate is HeapMemory
    assert CacheSetup.read(bundle, HtpEngine(CHIP), CacheOptions()).allocation.allocate is HeapMemory


def test_on_windows_the_library_lies_beside_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Key:
        def __enter__(self) -> Key:
            return self

        def __exit__(self, *_: object) -> None: ...

    path = r"\SystemRoot\System32\DriverStore\FileRepository\qcnspmcdm8380\qcnspmcdm8380.sys"
    registry = SimpleNamespace(
        HKEY_LOCAL_MACHINE=0, OpenKey=lambda root, name: Key(), QueryValueEx=lambda key, name: (path, 2)
    )
    monkeypatch.setitem(sys.modules, "winreg", registry)
    monkeypatch.setenv("SYSTEMROOT", r"C:\Windows")
    found = rpc_memory(Platform("windows", "arm64"))
    assert found == r"C:\Windows\System32\DriverStore\FileRepository\qcnspmcdm8380\libcdsprpc.dll"
    assert rpc_memory(BOARD) == "libcdsprpc.so"
