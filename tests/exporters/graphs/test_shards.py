import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import load_file, save

from exporters.graphs.weights import TensorStream, write_shard

DTYPES = st.sampled_from(["float32", "int8", "uint8", "uint16"])
SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)


@given(tensors=st.dictionaries(st.text("ab.", min_size=1), st.tuples(DTYPES, SHAPES), min_size=1, max_size=5))
def test_it_writes_what_the_library_writes(tmp_path_factory, tensors):
    arrays = {name: np.arange(np.prod(shape)).astype(dtype).reshape(shape) for name, (dtype, shape) in tensors.items()}
    path = tmp_path_factory.getbasetemp() / "a.safetensors"
    places = write_shard(path, arrays)
    content = path.read_bytes()
    assert content == save(arrays)
    for name, array in arrays.items():
        place = places[name]
        assert content[place.offset : place.offset + place.bytes] == array.tobytes()


def test_a_streamed_tensor_is_written_some_rows_at_a_time(tmp_path):
    table = np.arange(60, dtype=np.uint16).reshape(20, 3)
    streamed = TensorStream(np.uint16, table.shape, lambda: (table[first : first + 7] for first in range(0, 20, 7)))
    write_shard(tmp_path / "a.safetensors", {"small": np.ones(3, np.int8), "table": streamed})
    assert (load_file(tmp_path / "a.safetensors")["table"] == table).all()


def test_blocks_that_do_not_fill_the_shape_are_an_error_of_the_program(tmp_path):
    with pytest.raises(ValueError, match="table"):
        write_shard(tmp_path / "a.safetensors", {"table": TensorStream(np.int8, (3,), lambda: [np.ones(2, np.int8)])})
