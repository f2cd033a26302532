"""RAM and disk that an export needs, checked before it starts."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from edgekv.errors import BundleError, EngineError, UsageError
from edgekv.machine.system import free_memory_bytes
from edgekv.plan import EncoderPlan, graph_bytes, graphs_bytes, quantization_bytes, writing_bytes
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.tensors import HEAD, matrices
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.allocation import type_bytes
from exporters.quantize.generated import WINDOWS_AT_ONCE, texts_of
from exporters.quantize.recipe import Recipe
from quant import WEIGHT_TYPES, WeightDtype

_FILE_COPIES = 3  # its parts, the file put together, and what is handed to the system
_PROCESS_BYTES = 200_000_000  # the interpreter, its packages and the tokenizer
_ENGINE_COPIES = 4  # of a bundle
_RECORDS = 0.41  # of a graph before it is compressed
_SHARE_OF_FREE = 4
_COPIES_OF_SCORES = 4  # logits, those that may be drawn, and their exponentials
_RESIDUALS_BYTES = 500_000_000  # that an export may write to be resumed, whatever the size of its bundle
_MEASURING = "measuring what the bundle lost"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def check_ram(
    spec: DecoderSpec,
    tokens: int,
    window: int,
    file_bytes: int,
    max_bytes: int | None,
    *,
    generates: bool = False,
    quality_bytes: int = 0,
    encoder: EncoderPlan | None = None,
) -> int:
    """Refuse a RAM limit that the export would exceed.

    The export uses as little RAM as it can, but for the values of calibration windows, which are in memory while there
    is room. Integers do not depend on the limit.

    Args:
        spec: the decoder.
        tokens: calibration tokens.
        window: tokens per calibration window.
        file_bytes: size of a file that is built in memory, such as a .tflite; 0 if there is none.
        max_bytes: the limit, or None.
        generates: whether the float model writes calibration text.
        quality_bytes: that the measurement at the end takes; 0 if there is none.
        encoder: of pictures; None if there is none.

    Returns:
        The bytes that are left for the values of calibration windows: below the limit, or without one a part of the RAM
        that is free.

    Raises:
        UsageError: naming what the export needs.
    """
    if max_bytes is None:
        try:
            return free_memory_bytes() // _SHARE_OF_FREE
        except EngineError:  # the system does not report it
            return 0
    needs = {
        f"a layer on {tokens:,} calibration tokens": quantization_bytes(
            spec.sizes, 2 * spec.layers * spec.kv_heads, tokens, window
        ),
        "writing weights": writing_bytes(spec.sizes) + _FILE_COPIES * file_bytes,
    }
    if generates:
        needs["the float model, which writes text for --effort"] = generated_bytes(spec, window)
    if quality_bytes:
        needs[_MEASURING] = quality_bytes
    if encoder is not None:
        needs["the vision encoder"] = encoder.quantization_peak_bytes
    stage, needed = max(needs.items(), key=lambda need: need[1])
    if needed > max_bytes:
        fewer = quantization_bytes(spec.sizes, 2 * spec.layers * spec.kv_heads, min(tokens, 2 * window), window)
        fix = f"Use --max-ram {_gb(needed)} or more"
        if stage == _MEASURING:
            fix += ", or --no-quality-check"
        elif generates:
            fix += ", or a lower --effort"
        if fewer < needed and stage == next(iter(needs)):
            fix += f", or fewer --calibration-tokens: with {2 * window:,} it takes {_gb(fewer)}"
        raise UsageError("--max-ram", got=_gb(max_bytes), expected=f"{_gb(needed)} for {stage}", fix=fix + ".")
    return max_bytes - needed


def check_disk(needs: Mapping[Path, int]) -> None:
    """Refuse an export that does not fit on its disks.

    Args:
        needs: bytes that will be written under each folder, which need not exist yet.

    Raises:
        BundleError: naming the disk and the space needed.
    """
    disks: dict[int, list[Path]] = {}
    for folder in needs:
        disks.setdefault(_existing(folder).stat().st_dev, []).append(folder)
    for folders in disks.values():
        needed_bytes = sum(needs[folder] for folder in folders)
        free_bytes = shutil.disk_usage(_existing(folders[0])).free
        if free_bytes < needed_bytes:
            raise BundleError(
                f"disk of {' and '.join(str(folder) for folder in folders)}",
                got=f"{_gb(free_bytes)} free",
                expected=f"{_gb(needed_bytes)}",
                fix="Free some space, or choose another disk with -o and --cache-dir.",
            )


def generated_bytes(spec: DecoderSpec, window: int) -> int:
    """RAM of the float model and of the KV cache of the windows that it writes at a time."""
    sizes = spec.sizes
    parameters = sizes.all_layer_parameters + 2 * sizes.table_parameters
    cache = 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * WINDOWS_AT_ONCE * window
    scores = _COPIES_OF_SCORES * WINDOWS_AT_ONCE * texts_of(window) * sizes.vocab
    return _PROCESS_BYTES + 4 * (parameters + cache + scores)


def residual_every(spec: DecoderSpec, tokens: int, decoders: int, size_bytes: int) -> int:
    """Of how many layers one stores the residual after it, so that those of an export take no more than its bundle.

    Args:
        spec: the decoder.
        tokens: of the calibration text.
        decoders: 2 if the quantized one runs beside the exact one, else 1.
        size_bytes: of the bundle.
    """
    residuals = spec.sizes.layers * decoders * 4 * tokens * spec.sizes.hidden
    return max(1, -(-residuals // max(size_bytes, _RESIDUALS_BYTES)))


def stage_bytes(spec: DecoderSpec, tokens: int, every: int = 1) -> int:
    """Disk space of the stages of an export: one byte per weight, the residual after one layer of `every` and the last
    one, and the values of a layer while it is quantized.
    """
    sizes = spec.sizes
    residual = 2 * 4 * tokens * sizes.hidden
    values = 2 * residual + 2 * 4 * tokens * sizes.intermediate
    stored = min(sizes.layers, sizes.layers // every + 1)
    return sizes.all_layer_parameters + stored * residual + values + sizes.table_parameters


def engine_bytes(size_bytes: int) -> int:
    """RAM of the CPU engine, at the peak of loading a bundle of this size."""
    return _PROCESS_BYTES + _ENGINE_COPIES * size_bytes


def bundle_bytes(spec: DecoderSpec, recipe: Recipe, graphs: int) -> int:
    """Disk space of a bundle."""
    types = {name: WEIGHT_TYPES[recipe.rule(name).dtype] for name in matrices(spec)}
    bits = sum(rows * inputs * types[name].bits for name, (rows, inputs) in matrices(spec).items())
    table = 0 if spec.shares_vocabulary else spec.sizes.table_parameters
    return bits // 8 + table + graphs_bytes(spec.sizes, graphs)


def other_bytes(checkpoint: Checkpoint, graphs: int, head: WeightDtype | None = None) -> int:
    """Disk space of all that a bundle has beside the matrices of its layers, fitted to bundles with blocks.

    Args:
        checkpoint: the checkpoint.
        graphs: their number.
        head: type of the head; None to leave out the vocabulary.
    """
    spec = checkpoint.spec
    records = (
        round(_RECORDS * graph_bytes(spec.sizes)) + 2 * spec.vocab
    )  # encodings in the manifest, headers of shards, the sink
    return (
        (0 if head is None else type_bytes(spec, HEAD, head))
        + graphs_bytes(spec.sizes, graphs)
        + records
        + len(checkpoint.tokenizer_json())
    )


@contextmanager
def full_disk_named(folder: Path, what: str, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn a full disk into an error that names what was being written.

    Args:
        folder: on the disk.
        what: was being written.
        needed_bytes: space that it needs; None if unknown.

    Raises:
        BundleError: in place of the system's error.
    """
    try:
        yield
    except OSError as error:
        is_short = error.errno is None and "requested and" in str(error)  # of numpy, which drops the number
        if error.errno not in _FULL and not is_short:
            raise
        raise BundleError(
            f"disk of {folder}",
            got=f"{error.strerror or 'a short write'} while writing {what}",
            expected="room for it" if needed_bytes is None else f"{_gb(needed_bytes)} for it",
            fix="Free some space, or choose another disk with -o, --cache-dir or --store, and run the same command "
            "again, an export with --resume; no partial file was left.",
        ) from error


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())


def _gb(size_bytes: int) -> str:
    """Rounded up, so that the size named is enough."""
    step = 10**6 if size_bytes < 10**9 else 10**7
    size = -(-size_bytes // step) * step
    return f"{size / 1e9:.2f}GB" if size >= 10**9 else f"{size // 10**6}MB"
