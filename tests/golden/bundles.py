"""Hashes of a bundle of each architecture and of each special form: an edit of an export that changes no byte shows it.

Usage, from the repository's root, before and after the edit; the second run names what differs:

    python -m tests.golden.bundles before.json
    python -m tests.golden.bundles after.json --compare before.json

A change on purpose is recorded with `--record`, for `test_golden`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

from edgekv.bundle import MANIFEST, open_bundle
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.lora import AdapterChoice
from exporters.drafter import Drafter
from exporters.export import RunOptions, export_bundle, export_drafter
from exporters.lora.options import LoraOptions
from exporters.quantize.effort import EFFORTS
from tests.support.checkpoints import ARCHITECTURES, add_head, width_of, write_checkpoint, write_drafter, write_sinking
from tests.support.exports import export_options
from tests.support.foreign_files import write_adapter
from tests.support.picture_models import write_internvl, write_lfm2_vl, write_qwen3_vl, write_smolvlm

Hashes = dict[str, str]
RECORDED = Path(__file__).with_suffix(".json")


def hashes(bundle: Path) -> Hashes:
    """The hash of each file of a bundle, by its path there; the manifest's without the checkpoint's place."""
    found = {}
    for path in sorted(bundle.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            if path.name == MANIFEST:
                manifest = json.loads(content)
                manifest["source"]["checkpoint"] = manifest["seal"] = manifest["producer"] = ""
                content = json.dumps(manifest).encode()
            found[path.relative_to(bundle).as_posix()] = sha256(content).hexdigest()[:16]
    return found


def bundles(scratch: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Names of bundles, and what writes each into a folder."""

    def plain(checkpoint: Path, **options: Any) -> Callable[[Path], object]:
        run = RunOptions(cache_dir=scratch / "cache")
        chosen = export_options(**{"context": 64, "ar": (1, 8), "calibration_tokens": 1024, **options})
        return lambda folder: export_bundle(Checkpoint.open(str(checkpoint)), folder, chosen, run)

    for name in sorted(ARCHITECTURES):
        at = crc32(name.encode())  # options of an architecture are its own: a new one changes no other's
        checkpoint = write_checkpoint(scratch / name, ARCHITECTURES[name])
        config = json.loads((checkpoint / "config.json").read_bytes())
        has_blocks = width_of(config) % 32 == 0
        recipe = ("w8a16", "w4a16", "w4a16-lpbq32" if has_blocks else "w4a16")[at % 3]
        layout, kv = ("rows", "columns")[at % 2], ("u8", "s16")[at // 2 % 2]
        yield name, plain(checkpoint, recipe=recipe, key_layout=layout, kv_dtype=kv)
    small = write_checkpoint(scratch / "small", ARCHITECTURES["smollm2"])
    yield "tflite", plain(small, graph_format="tflite", kv_dtype="s8")
    yield "tflite-embeddings", plain(small, graph_format="tflite", kv_dtype="s8", embedding="host")
    yield "parts", plain(small, splits=2, embedding="host", head="own", recipe="w4a16", draft_rows=(4,))
    yield "hidden", plain(small, give_hidden=True)
    yield "quality", plain(small, check_quality=True)
    yield "sink", plain(write_sinking(scratch / "sinking", ARCHITECTURES["qwen3"]), recipe="w4a16")
    write_adapter(scratch / "adapter", small)
    slots = LoraOptions(8, calibrate=(AdapterChoice(scratch / "adapter"),))
    yield "slots", plain(small, lora=slots)
    pictured = {"internvl": write_internvl, "lfm2_vl-pictures": write_lfm2_vl, "qwen3_vl-pictures": write_qwen3_vl}
    for name, write in (pictured | {"smolvlm": write_smolvlm}).items():
        yield name, plain(write(scratch / name), calibration_tokens=512)
    yield "internvl-tflite", plain(scratch / "internvl", graph_format="tflite", kv_dtype="s8", calibration_tokens=512)
    for name, write_both in (("cache-drafter", _of_cache), ("head-drafter", _of_head)):
        target, drafter = write_both(scratch / name)
        target_bundle = scratch / name / "target"
        plain(target, give_hidden=True, recipe="w8a16")(target_bundle)
        options = export_options("w4a16", calibration_tokens=512, effort=EFFORTS[1])
        yield name, _drafter(target_bundle, drafter, options)


def _drafter(target: Path, drafter: Path, options: Any) -> Callable[[Path], object]:
    run = RunOptions(cache_dir=target.parent / "cache")
    return lambda folder: export_drafter(Drafter.open(str(drafter), open_bundle(target)), folder, options, run)


def _of_cache(folder: Path) -> tuple[Path, Path]:
    target = write_checkpoint(folder / "model", {**ARCHITECTURES["gemma4"], "sliding_window": 512}, gain=1.0)
    return target, write_drafter(folder / "drafter", target, sliding_window=512)


def _of_head(folder: Path) -> tuple[Path, Path]:
    both = add_head(write_checkpoint(folder / "model", ARCHITECTURES["qwen3_5"], gain=1.0))
    return both, both


def made_with() -> dict[str, str]:
    """What else the bytes depend on: the packages that write files, and the kernels of BLAS."""
    found = {package: metadata.version(package) for package in ("numpy", "onnx", "tokenizers")}
    return found | {"OPENBLAS_CORETYPE": os.environ.get("OPENBLAS_CORETYPE", ""), "machine": platform.machine()}


def digests(scratch: Path, only: Sequence[str] = ()) -> Iterator[tuple[str, Hashes]]:
    """Make the bundles, one after another; the name of each, and its hashes."""
    for name, write in bundles(scratch):
        if not only or name in only:
            write(scratch / "bundles" / name)
            yield name, hashes(scratch / "bundles" / name)


def digest(files: Hashes) -> str:
    """Of all files of a bundle."""
    return sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", nargs="*", default=())
    given = parser.parse_args()
    found: dict[str, Hashes] = {}
    with TemporaryDirectory() as scratch:
        for name, files in digests(Path(scratch), given.only):
            found[name] = files
            print(name, len(files), flush=True)
    given.file.write_text(json.dumps(found, indent=1) + "\n")
    if given.record:
        recorded = {"made_with": made_with(), "bundles": {name: digest(files) for name, files in found.items()}}
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
    if given.compare is not None:
        before = json.loads(given.compare.read_text())
        for name, files in found.items():
            wanted = before[name]
            changed = sorted(file for file in files.keys() | wanted.keys() if files.get(file) != wanted.get(file))
            if changed:
                print(f"{name}: {', '.join(changed)} differ")


if __name__ == "__main__":
    main()
