"""Exports that tests share. Each is made once per code that makes it, checkpoint and options, and kept for later runs.

They lie in `build/test-cache`, or in EDGEKV_TEST_CACHE. A test that writes takes a copy; `changed` names the files of
shared folders that were written to nevertheless.

A new architecture is a configuration in `checkpoints.ARCHITECTURES`: tests of all architectures take it from there, and
share the one export of it that `exported_architecture` makes. A test that needs some bundle of an architecture, and no
option in particular, takes that one too.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from devices import find
from edgekv.bundle import open_bundle
from edgekv.machine.program import program_sources
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.compile import compile_bundle
from exporters.export import ExportOptions, RunOptions, export_bundle
from exporters.quantize.recipe import Recipe, find_recipe
from tests.support.checkpoints import ARCHITECTURES, width_of, write_checkpoint

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("EDGEKV_TEST_CACHE") or ROOT / "build" / "test-cache").resolve()
EXPORTS = ("exporters.export", "exporters.compile")
"""The modules that make exports."""
RUNNING = tuple(f"edgekv.{name}" for name in ("cli", "draft", "engine", "model", "paged", "prefix", "serve"))
"""What runs bundles, and how their names begin."""
KEPT_BYTES = 8 << 30
GIVEN = "EDGEKV_TEST_PLATFORM"
LONGEST_RUN_S = 3600
CALIBRATION_TOKENS = {"random": 1024, "trained": 4096}
"""Of the tests' models, unless a test says otherwise: the default number takes seconds more for each export."""

Contents = dict[str, tuple[int, int]]
"""Size in bytes and modification time in ns of each file in a folder, by its path there."""

_used: set[Path] = set()


def export_options(recipe: str | Recipe = "w8a16", device: str = "SM8650", **changes: Any) -> ExportOptions:
    """Options of a test's export, which is not checked on the HTP compiler unless the test says so."""
    chosen = find_recipe(recipe) if isinstance(recipe, str) else recipe
    return ExportOptions(find(device), chosen, **{"check_on_htp": False, "check_quality": False, **changes})


def small_options(recipe: str | Recipe = "w8a16", **changes: Any) -> ExportOptions:
    """Options of an export of a random model, which `exported` does not share."""
    return export_options(recipe, **{"calibration_tokens": CALIBRATION_TOKENS["random"], **changes})


def exported(checkpoint: Path, options: ExportOptions, *, compiled: bool = False) -> Path:
    """A shared bundle. A copy of its checkpoint lies beside it in `checkpoint`, unless that is the repository's own.

    Exports of one checkpoint with one recipe share their quantized layers too.

    Args:
        checkpoint: a folder, which need not outlive this call.
        options: what the bundle is for.
        compiled: add the context binaries of the options' device.
    """
    lasting = ROOT / "models" in checkpoint.resolve().parents
    if options.calibration_tokens is None:
        options = replace(options, calibration_tokens=CALIBRATION_TOKENS["trained" if lasting else "random"])
    if compiled and options.check_on_htp:  # what compiles is checked too
        options, compiled = replace(options, compile=True), False
    source = (str(checkpoint.resolve()) if lasting else "", _digest(checkpoint))
    calibration = options.calibration and (options.calibration.name, options.calibration.read_bytes())

    def make(folder: Path) -> None:
        own = checkpoint if lasting else shutil.copytree(checkpoint, folder / "checkpoint")
        with quantized_layers(source, options.recipe) as layers:
            run = RunOptions(cache_dir=layers, resume=True, keep_pieces=True)
            export_bundle(Checkpoint.open(str(own)), folder / "bundle", options, run)
        if compiled:
            compile_bundle(open_bundle(folder / "bundle"), options.device)

    return kept("export", EXPORTS, make, source, replace(options, calibration=None), calibration, compiled) / "bundle"


@contextmanager
def quantized_layers(*key: object) -> Iterator[Path]:
    """A cache directory that exports share, one at a time: with --resume and --keep-pieces each layer is made once."""
    layers = platform_folder() / f"layers-{_short(_code(EXPORTS), *key)}"
    with FileLock(layers.with_suffix(".lock")):
        yield layers


@cache
def exported_architecture(name: str) -> Path:
    """A shared bundle of a random model of one of `ARCHITECTURES`, in a context of 64; its checkpoint lies beside it.

    The recipe, the layout of keys and the type of the cache alternate.
    """
    at = sorted(ARCHITECTURES).index(name)
    with TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder), ARCHITECTURES[name])
        config = json.loads((checkpoint / "config.json").read_bytes())
        has_blocks = width_of(config) % 32 == 0
        options = export_options(
            ("w8a16", "w4a16", "w4a16-lpbq32" if has_blocks else "w4a16")[at % 3],
            context=64,
            ar=(1, 8),
            key_layout=("rows", "columns")[at % 2],
            kv_dtype=("u8", "s16")[at // 2 % 2],
        )
        return exported(checkpoint, options)


def kept(kind: str, code: tuple[str, ...], make: Callable[[Path], object], *key: object) -> Path:
    """A shared folder, made by whichever process asks for it first.

    Args:
        kind: begins the folder's name.
        code: the modules that make its contents, by name.
        make: fills the empty folder that it is given, which is where it stays.
        key: what the contents depend on besides that code, each with a repr that says all of it.
    """
    folder = platform_folder() / f"{kind}-{_short(_code(code), *key)}"
    record = folder.with_suffix(".json")
    with FileLock(folder.with_suffix(".lock")):
        if not record.is_file() or _recorded(record) != _contents(folder):
            record.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            make(folder)
            record.write_bytes(msgspec.json.encode(_contents(folder)))
        os.utime(record)
    _used.add(folder)
    return folder


def changed() -> list[str]:
    """Files in shared folders that this process used and that were written, added or removed since they were made."""
    found: list[str] = []
    for folder in sorted(_used):
        before, now = _recorded(folder.with_suffix(".json")), _contents(folder)
        found += (f"{folder}/{path}" for path in sorted({path for path, _ in before.items() ^ now.items()}))
    return found


def forget_layers() -> None:
    """Remove quantized layers, the largest files here: with the exports kept, a later run hardly needs them."""
    for lock in CACHE.glob("*/layers-*.lock"):
        with suppress(Timeout), FileLock(lock, blocking=False):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)


def prune() -> None:
    """Remove what was not used for longest, down to KEPT_BYTES, unless a run may still be using it."""
    left = KEPT_BYTES
    last_use = {record: record.stat().st_mtime for record in CACHE.glob("*/*.json")}
    for record in sorted(last_use, key=lambda record: -last_use[record]):
        left -= sum(size for size, _ in _recorded(record).values())
        if left < 0 and last_use[record] < time.time() - LONGEST_RUN_S:
            shutil.rmtree(record.with_suffix(""), ignore_errors=True)
            record.with_suffix(".lock").unlink(missing_ok=True)
            record.unlink(missing_ok=True)


@lru_cache(maxsize=1)
def platform_folder() -> Path:
    """The folder of what is made on this platform.

    It is named after Python, every installed package, and the processor: BLAS has kernels for each, and integers depend
    on them. EDGEKV_TEST_PLATFORM names another platform's, whose exports are used then.
    """
    if given := os.environ.get(GIVEN):
        return CACHE / given
    installed = sorted({path.name for folder in sys.path for path in Path(folder).glob("*.dist-info")})
    return CACHE / _short(platform.python_version(), _processor(), installed)


@cache
def _code(modules: tuple[str, ...]) -> str:
    """A digest of `code_files`."""
    return _short(
        [(str(file.relative_to(ROOT)), sha256(file.read_bytes()).hexdigest()) for file in code_files(modules)]
    )


def code_files(modules: tuple[str, ...]) -> list[Path]:
    """The files that modules depend on: other modules of the program, and data beside them.

    What runs a bundle is left out: it is imported to measure what an export lost, which no shared export does.
    """
    sources = [path for name, (path, _) in program_sources(*modules).items() if not name.startswith(RUNNING)]
    data = (file for folder in {path.parent for path in sources} for file in _data(folder))
    return sorted({*sources, *data})


def _data(package: Path) -> Iterator[Path]:
    """Files of a package that are no modules, in it and in its folders that are no packages."""
    for path in package.iterdir():
        if path.is_dir() and path.name != "__pycache__" and not (path / "__init__.py").is_file():
            yield from _data(path)
        elif path.is_file() and path.suffix != ".py":
            yield path


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else [platform.processor()]
    return next((line for line in lines if line.startswith("model name")), platform.machine())


def _short(*key: object) -> str:
    return sha256(repr(key).encode()).hexdigest()[:16]


def _digest(folder: Path) -> str:
    return _short([(str(path.relative_to(folder)), sha256(path.read_bytes()).hexdigest()) for path in _files(folder)])


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)


def _contents(folder: Path) -> Contents:
    """Sizes and times of files, but for the scratch folders of tests that run meanwhile."""
    paths = {path.relative_to(folder): path for path in _files(folder)}
    return {
        str(name): (path.stat().st_size, path.stat().st_mtime_ns)
        for name, path in paths.items()
        if not name.parts[0].startswith(".edgekv-")
    }


def _recorded(record: Path) -> Contents:
    return msgspec.json.decode(record.read_bytes(), type=Contents)
