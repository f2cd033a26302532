"""Files of named arrays are those of the package safetensors."""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load, save

from edgekv.machine.tensor_file import TensorFileError, decode_tensors, encode_tensors

DTYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]
shapes = arrays.array_shapes(min_dims=0, min_side=0, max_side=3)
named_arrays = st.dictionaries(st.text(max_size=8), arrays.arrays(st.sampled_from(DTYPES), shapes), max_size=4).filter(
    lambda named: "__metadata__" not in named
)


@given(named_arrays, st.dictionaries(st.text(max_size=4), st.text(max_size=8), max_size=1))
def test_files_are_those_of_the_package(named, metadata):
    content = encode_tensors(named, metadata)
    assert content == save(named, metadata=metadata or None)
    read = decode_tensors(content)
    assert read.metadata == metadata and read.arrays.keys() == named.keys()
    for name, array in load(content).items():
        assert read.arrays[name].dtype == array.dtype and read.arrays[name].shape == array.shape
        assert read.arrays[name].tobytes() == array.tobytes()


def test_arrays_of_any_layout_are_written_by_rows():
    array = np.arange(6, dtype=">i2").reshape(2, 3).T
    assert decode_tensors(encode_tensors({"a": array})).arrays["a"].tolist() == [[0, 3], [1, 4], [2, 5]]


def _file(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def _entry(shape: object, offsets: object, dtype: object = "U8") -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b"\xff" * 8, "truncated"),
        (_file(b"{"), "header"),
        (_file(b"\xff\xfe"), "header"),
        (_file(b"[" * 100_000), "header"),
        (_file([]), "header"),
        (_file({"__metadata__": {"a": 1}}), "header"),
        (_file({"a": {}}), "header"),
        (_file(_entry([2], [0, 2]), b"x"), "1 bytes of arrays, not 2"),
        (_file(_entry([1], [0, 1]), b"xx"), "2 bytes of arrays, not 1"),
        (_file(_entry([1], [1, 2]), b"xx"), "a does not begin"),
        (_file(_entry([3], [0, 2]), b"xx"), "a of shape"),
        (_file(_entry([-1, -2], [0, 2]), b"xx"), "a of shape"),
        (_file(_entry([2], [0, -2]), b"xx"), "a of shape"),
        (_file(_entry([1 << 40, 1 << 40, 0], [0, 1]), b"x"), "a of shape"),
        (_file(_entry([1], [0, 1], "BF16"), b"x"), "unknown type BF16"),
        (_file(_entry([1], [0, 1]) | {"b": _entry([1], [0, 1])["a"]}, b"x"), "b does not begin"),
    ],
)
def test_what_is_no_whole_file_is_refused(content, reason):
    with pytest.raises(TensorFileError, match=reason):
        decode_tensors(content)


@given(st.binary(max_size=64), st.integers(0, 255))
def test_a_changed_header_is_read_or_refused(tail, byte):
    content = bytearray(encode_tensors({"a": np.zeros((2, 2), np.int16)}, {"k": "v"}))
    content[8 + byte % (len(content) - 8)] = byte
    with suppress(TensorFileError):
        found = decode_tensors(bytes(content) + tail)
        again = decode_tensors(encode_tensors(found.arrays, found.metadata))
        assert again.metadata == found.metadata
        assert {name: each.tobytes() for name, each in again.arrays.items()} == {
            name: each.tobytes() for name, each in found.arrays.items()
        }


@pytest.mark.parametrize("shape", [[0, 1 << 62, 4], [0, 1 << 70], [0] * 70])
def test_a_shape_that_no_array_has_is_named(shape: list[int]) -> None:
    header = json.dumps({"rows": {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}}).encode()
    with pytest.raises(TensorFileError, match="rows has a shape of"):
        decode_tensors(len(header).to_bytes(8, "little") + header)
