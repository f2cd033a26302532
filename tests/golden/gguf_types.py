"""Blocks of every GGUF type that package gguf does not write, as llama.cpp writes and reads them.

    python tests/golden/gguf_types.py LIBRARY            write them
    python tests/golden/gguf_types.py LIBRARY --check    compute them again and compare with the stored values

LIBRARY is libggml-base.so of llama.cpp. Run it from the root of the repository.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from exporters.checkpoint.gguf.tensors import K_TYPES, TABLE_TYPES

_FILE = Path(__file__).with_name("gguf_types.npz")
_SHAPE = _ROWS, _COLUMNS = 2, 256
_FLOATS = ctypes.POINTER(ctypes.c_float)


def _stored(library: ctypes.CDLL, kind: str, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The blocks of a matrix; all elements count alike."""
    block, size = GGML_QUANT_SIZES[number := GGMLQuantizationType[kind]]
    stored, importance = np.zeros((_ROWS, _COLUMNS // block * size), np.uint8), np.ones(_COLUMNS, np.float32)
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, _FLOATS, ctypes.c_void_p, *[ctypes.c_int64] * 3, _FLOATS]
    library.ggml_quantize_init(int(number))
    operands = (array.ctypes.data_as(_FLOATS) for array in (values, importance))
    source, weights = operands
    library.ggml_quantize_chunk(int(number), source, stored.ctypes.data, 0, _ROWS, _COLUMNS, weights)
    return stored


def _read(library: ctypes.CDLL, kind: str, stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What llama.cpp reads from blocks."""
    values = np.zeros(_SHAPE, np.float32)
    read = getattr(library, "dequantize_row_" + kind.lower().replace("_k", "_K"))
    read.argtypes = [ctypes.c_void_p, _FLOATS, ctypes.c_int64]
    read(stored.ctypes.data, values.ctypes.data_as(_FLOATS), values.size)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    library = ctypes.CDLL(str(Path(args.library).resolve()))
    values = (np.random.default_rng(3).normal(size=_SHAPE) * np.linspace(0.2, 3, _COLUMNS)).astype(np.float32)
    made: dict[str, NDArray[np.uint8] | NDArray[np.float32]] = {}
    for kind in (*K_TYPES, *TABLE_TYPES):
        made[kind] = stored = _stored(library, kind, values)
        made[f"{kind}.floats"] = _read(library, kind, stored)
    if not args.check:
        np.savez_compressed(_FILE, **made)
        return
    with np.load(_FILE) as kept:
        if wrong := [name for name, array in made.items() if not np.array_equal(array, kept[name])]:
            sys.exit(f"{_FILE}: differ: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
