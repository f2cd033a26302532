"""The HTP emulator itself runs here: the bundle's graphs are compiled and executed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import edgekv
from devices import find
from edgekv.errors import EngineError
from edgekv.machine import native_output
from edgekv.qnn import provider as qnn

pytestmark = pytest.mark.htp

STRATEGIES: tuple[dict[str, Any], ...] = (
    {"kv_update": "pointer-shift", "reserve": 2.0},
    {"kv_update": "pointer-shift", "reserve": 1.5},
    {"kv_update": "slot"},
    {"kv_update": "mirror"},
    {"kv_update": "shift-concat"},
)


def _held(model: edgekv.Model) -> np.ndarray[Any, Any]:
    rows: np.ndarray[Any, Any] = model.cache.arena.array[:, model.cache.held_rows()]
    return rows


TOKENS = [256, *((37 * i * i + 5 * i) % 2048 for i in range(39))]


def test_no_strategy_changes_a_bit(wide_on_htp: Path) -> None:
    """Bit by bit the same, also where the CPU's order of summation would show."""
    logits, rows = [], []
    for options in STRATEGIES:
        model = edgekv.load(wide_on_htp, "htp", verify=False, **options)
        logits.append(model.score(TOKENS))
        rows.append(_held(model))
    assert all(np.array_equal(logits[0], other) for other in logits[1:])
    assert all(np.array_equal(rows[0], other) for other in rows[1:])


def test_a_partly_filled_step_equals_single_steps_bit_by_bit(wide_on_htp: Path) -> None:
    model = edgekv.load(wide_on_htp, "htp", verify=False)
    chunked = model.score(TOKENS[:6])
    rows = _held(model)
    model.cache.reset()
    single = np.stack([model.session.feed((token,)).copy() for token in TOKENS[:6]])
    assert np.array_equal(chunked, model.bundle.manifest.encodings["logits"].dequantize(single))
    assert np.array_equal(rows, _held(model))


def test_a_refused_graph_is_explained_by_its_node(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The HTP multiplies no s16 by u8; the runtime itself says only that a node would fall back to the CPU."""
    path = tmp_path / "refused.onnx"
    _write_matmul_of_s16_and_u8(path)
    with pytest.raises(EngineError, match=r"refused.onnx on SM8650: got .*`the_matmul` of type `MatMul`"):
        qnn.create_session(path, find("SM8650"))
    assert capfd.readouterr() == ("", "")


def _write_matmul_of_s16_and_u8(path: Path) -> None:
    scale = numpy_helper.from_array(np.float32(0.1), "scale")
    zeros = [numpy_helper.from_array(np.int16(0), "s16"), numpy_helper.from_array(np.uint8(128), "u8")]
    nodes = [
        helper.make_node("DequantizeLinear", ["a", "scale", "s16"], ["a_f"]),
        helper.make_node("DequantizeLinear", ["b", "scale", "u8"], ["b_f"]),
        helper.make_node("MatMul", ["a_f", "b_f"], ["c_f"], name="the_matmul"),
        helper.make_node("QuantizeLinear", ["c_f", "scale", "s16"], ["c"]),
    ]
    inputs = [
        helper.make_tensor_value_info("a", TensorProto.INT16, [1, 1, 4, 8]),
        helper.make_tensor_value_info("b", TensorProto.UINT8, [1, 1, 8, 4]),
    ]
    outputs = [helper.make_tensor_value_info("c", TensorProto.INT16, [1, 1, 4, 4])]
    graph = helper.make_graph(nodes, "refused", inputs, outputs, [scale, *zeros])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


def test_native_output_is_captured_where_the_c_library_cannot_be_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where `ctypes.CDLL(None)` is a TypeError."""
    monkeypatch.setattr(native_output.ctypes, "CDLL", lambda name: pytest.fail("no handle there"))
    monkeypatch.setattr(native_output.os, "name", "nt")
    with native_output.captured_output() as output:
        os.write(1, b"from native code")
    monkeypatch.undo()
    assert output.text == "from native code"
