"""Writes safetensors files one tensor at a time, and large tensors some rows at a time.

The library's writer needs memory for everything twice. The bytes are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from edgekv.bundle.weights import Extent

_NAMES = {"float32": "F32", "uint16": "U16", "int8": "I8", "uint8": "U8"}  # in the library's order
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Streamed:
    """A tensor that is computed while it is written.

    Attributes:
        dtype: of its elements.
        shape: its dimensions.
        blocks: its elements in order, in chunks.
    """

    dtype: DTypeLike
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[NDArray[Any]]]


def write_shard(path: Path, tensors: Mapping[str, NDArray[Any] | Streamed]) -> dict[str, Extent]:
    """Write the tensors, sorted by descending type width, then by name; return the place of each.

    They are computed in the opposite order: scales may follow from the integers behind them.

    Raises:
        ValueError: the blocks of a streamed tensor do not fill its shape.
    """
    ranks = list(_NAMES)
    names = sorted(tensors, key=lambda name: (ranks.index(np.dtype(tensors[name].dtype).name), name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        dtype = np.dtype(tensor.dtype)
        begin, end = end, end + dtype.itemsize * int(np.prod(tensor.shape, dtype=np.int64))
        header[name] = {"dtype": _NAMES[dtype.name], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    data = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in reversed(names):
            tensor = tensors[name]
            file.seek(data + header[name]["data_offsets"][0])
            for block in tensor.blocks() if isinstance(tensor, Streamed) else (tensor,):
                file.write(np.ascontiguousarray(block, tensor.dtype).data)
            if file.tell() != data + header[name]["data_offsets"][1]:
                raise ValueError(f"{name}: got blocks of another size; expected shape {tensor.shape}")
    extents = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: Extent(data + begin, end - begin) for name, (begin, end) in extents.items()}
