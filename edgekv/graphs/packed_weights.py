"""Weights in files as ONNX Runtime's kernels read them: several graphs and processes share what they map."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from time import time

import onnx
import onnxruntime as ort

from edgekv.graphs.onnx_session import PROVIDERS, session_options
from edgekv.machine.scratch import atomic_file, held_folder, remove_abandoned
from edgekv.machine.system import sha256_of

WEIGHTS = ".weights"
SCRATCH = "rendering"
_SMALL_BYTES = 1 << 12
_PAGE_BYTES = 4096
_CONFIG = "session.optimized_model_external_initializers_"
_PACKED = "prepacked_"


def pack_weights(model: bytes, weights: Path, folder: Path) -> tuple[bytes, tuple[str, ...]]:
    """Write the weights of a model, each in a file named after its content.

    A file has a weight and what the kernels make of it when a session is created. Without the latter, each session
    would have its own copy of all weights in memory; with it, sessions map the file. A kernel that makes something
    else, such as on another processor, keeps its own copy.

    Args:
        model: serialized, with external weights.
        weights: the folder with these.
        folder: takes the files.

    Returns:
        The model with references to the files, and their names: the SHA-256 of each in hexadecimal digits.
    """
    with held_folder(folder, SCRATCH) as scratch:
        path, data = scratch / "model.onnx", scratch / "model.data"
        options = session_options(weights, 1)
        options.optimized_model_filepath = str(path)
        options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
        options.add_session_config_entry(f"{_CONFIG}file_name", data.name)
        options.add_session_config_entry(f"{_CONFIG}min_size_in_bytes", str(_SMALL_BYTES))
        ort.InferenceSession(model, options, providers=PROVIDERS)
        proto = onnx.load(path, load_external_data=False)
        external = [tensor for tensor in proto.graph.initializer if tensor.external_data]
        if not external:
            return proto.SerializeToString(), ()
        with data.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            names = [_move(tensor, content, folder) for tensor in external]
    return proto.SerializeToString(), tuple(sorted(set(names)))


def _move(tensor: onnx.TensorProto, content: mmap.mmap, folder: Path) -> str:
    """Copy a weight, and what kernels made of it, to a file of its own, and refer to it there."""
    pieces: list[bytes] = []
    length = 0

    def moved(offset: str, size: str) -> str:
        """Append a piece; return where it is."""
        nonlocal length
        gap = -length % _PAGE_BYTES
        pieces.extend((b"\0" * gap, content[int(offset) : int(offset) + int(size)]))
        start, length = length + gap, length + gap + int(size)
        return str(start)

    entries = {entry.key: entry for entry in tensor.external_data}
    entries["offset"].value = moved(entries["offset"].value, entries["length"].value)
    for key in sorted(entry for entry in entries if entry.startswith(_PACKED)):
        kernel, *blobs = entries[key].value.split("|")
        places = [blob.split(";") for blob in blobs]  # offset, length, checksum
        entries[key].value = "|".join(
            [kernel, *(";".join([moved(at, size), size, *rest]) for at, size, *rest in places)]
        )
    digest = sha256()
    for piece in pieces:
        digest.update(piece)
    name = digest.hexdigest() + WEIGHTS
    entries["location"].value = name
    target = folder / name
    if target.exists() and sha256_of(target) == target.stem:
        os.utime(target)
        return name
    with atomic_file(target, flush=False) as partial:
        partial.touch(0o600)
        with partial.open("wb") as file:
            file.writelines(pieces)
    return name


def remove_unused_weights(folder: Path, used: set[str], age_s: float = 3600.0) -> None:
    """Remove files of weights that no model uses, and what interrupted processes left.

    Args:
        folder: see `pack_weights`.
        used: names, see `pack_weights`.
        age_s: younger files stay: another process may be writing the model that uses them.
    """
    oldest_s = time() - age_s
    remove_abandoned(folder)
    for path in folder.glob(f"*{WEIGHTS}"):
        with suppress(OSError):
            if path.name not in used and path.stat().st_mtime <= oldest_s:
                path.unlink()
