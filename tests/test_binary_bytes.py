"""`benchmarks.binary_bytes`: what a layer takes in binaries."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.binary_bytes import BinaryBytes, compiled_bytes, export
from benchmarks.large_checkpoint import write_large_checkpoint

pytest.importorskip("onnxruntime_qnn")

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}


def test_a_layer_is_the_difference_of_two_models() -> None:
    one = BinaryBytes(bits=10, scaled=12, alone=40, shared=70, graphs=4)
    two = BinaryBytes(bits=20, scaled=24, alone=60, shared=120, graphs=4)
    layer = two.beyond(one)
    assert layer == BinaryBytes(bits=10, scaled=12, alone=20, shared=50, graphs=4)
    assert layer.each_further == 10
    assert "5.000 x the integers" in str(layer)


@pytest.mark.slow
def test_graphs_of_one_binary_share_the_matrices(tmp_path: Path) -> None:
    checkpoint = write_large_checkpoint(tmp_path / "c", "qwen2.5-0.5b", _TINY | {"num_hidden_layers": 1})
    export(checkpoint, tmp_path / "b", ["--recipe", "w8a16", "--context", "128", "--ar", "1,32"])
    found = compiled_bytes(tmp_path / "b", checkpoint, "w8a16")
    assert found.graphs == 2
    assert found.bits < found.scaled < found.alone < found.shared < 2 * found.alone
