"""The graphs that onnxruntime-genai gets: the decoder with stacked heads, and the two around it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, strategies as st

from devices import find
from edgekv.bundle import Bundle, open_bundle
from edgekv.errors import EngineError
from edgekv.machine.graph_file import plain_name
from edgekv.runtime import CpuEngine, HtpEngine
from edgekv.runtime.graph import rope_tables
from exporters.graphs.parts import save_part
from exporters.htp.check import floating_nodes
from exporters.targets.genai.proof import prove_integers
from exporters.targets.genai.write import dequantizer, position_processor, stacked_graph
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import export_options, exported
from tests.support.thorough import at_most

DEVICE = find("SM8650")
CONTEXT, AR = 64, 16


@pytest.fixture(scope="module", params=["rows", "columns"])
def small(request, tmp_path_factory) -> Bundle:
    """A bundle of a small random checkpoint, whose heads all have scales of their own."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint")
    return open_bundle(exported(checkpoint, export_options(context=CONTEXT, ar=(1, AR), key_layout=request.param)))


def write_stacked(bundle: Bundle, role: str, folder: Path) -> Path:
    record = bundle.manifest.graph(role)
    path = folder / f"stacked_{plain_name(record.file)}"
    save_part(stacked_graph(bundle, record), path, bundle.path)
    return path


def run(session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [port.name for port in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def stacked(bundle: Bundle, per_head: dict[str, np.ndarray], end: str) -> dict[str, np.ndarray]:
    """The tensors of a layer's heads as one, keys in columns."""
    joined: dict[str, list[np.ndarray]] = {}
    for tensor in bundle.manifest.geometry.names():
        values = per_head[tensor.past if end == "in" else tensor.new]
        turned = tensor.kind == "key" and bundle.manifest.key_layout == "rows"
        joined.setdefault(f"past_{tensor.kind}_{tensor.layer}_{end}", []).append(
            values.swapaxes(2, 3) if turned else values
        )
    return {name: np.ascontiguousarray(np.concatenate(parts)) for name, parts in joined.items()}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["cpu", "htp"])
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_stacking_heads_changes_no_integer(small: Bundle, role: str, engine: str, tmp_path: Path) -> None:
    """AR-16 is one of those for which the compiler multiplies wrongly what is not laid out as one row."""
    path = write_stacked(small, role, tmp_path)
    made = CpuEngine() if engine == "cpu" else HtpEngine(DEVICE)
    plain, whole = made.session(small.graph_path(small.manifest.graph(role))), made.session(path)
    random = np.random.default_rng(0)
    feeds = {}
    for port in plain.get_inputs():
        dtype = np.dtype(port.type.removeprefix("tensor(").rstrip(")"))
        feeds[port.name] = random.integers(0, 320 if dtype == np.int32 else np.iinfo(dtype).max, port.shape, dtype)
    if role == "prefill":
        feeds["logits_index"][:] = AR - 1
    expected = run(plain, feeds)
    cache = {tensor.past for tensor in small.manifest.geometry.names()} | {"logits_index"}
    found = run(
        whole, {name: array for name, array in feeds.items() if name not in cache} | stacked(small, feeds, "in")
    )
    assert np.array_equal(found.pop("logits"), expected["logits"])
    wanted = stacked(small, expected, "out")
    assert set(found) == set(wanted)
    assert all(np.array_equal(found[name], array) for name, array in wanted.items())


@pytest.mark.htp
def test_stacking_heads_keeps_the_graphs_in_integers(small: Bundle, tmp_path: Path) -> None:
    assert floating_nodes([write_stacked(small, role, tmp_path) for role in ("decode", "prefill")], DEVICE) == []


@pytest.mark.thorough
@pytest.mark.slow
def test_the_proof_finds_a_head_that_is_scaled_twice(small: Bundle, tmp_path: Path) -> None:
    path = write_stacked(small, "decode", tmp_path)
    stacked = {small.manifest.graph("decode").name: path}
    prove_integers(small, stacked, None)
    model = onnx.load(path, load_external_data=False)
    (one,) = (
        t for t in model.graph.initializer if t.name.startswith("past_value_1_h1_out") and t.name.endswith("_one_q")
    )
    one.CopyFrom(onnx.numpy_helper.from_array(np.array(2, np.uint8), one.name))
    onnx.save(model, path)
    with pytest.raises(EngineError, match=r"past_value_1_out of ar1_cl64: other integers"):
        prove_integers(small, stacked, None)
    path.write_bytes(b"no graph")
    with pytest.raises(EngineError, match=r"graphs with stacked heads: got stacked_ar1_cl64.onnx on the CPU"):
        prove_integers(small, stacked, None)


@at_most(50)
@given(st.data(), st.sampled_from([1, AR]))
def test_the_position_processor_writes_what_our_own_loop_does(small: Bundle, data: st.DataObject, ar: int) -> None:
    manifest = small.manifest
    held = data.draw(st.integers(1, CONTEXT))
    last = data.draw(st.integers(0, CONTEXT - 1))
    positions = np.clip(np.arange(last - ar + 1, last + 1), 0, None).astype(np.int32)
    columns = (np.arange(CONTEXT) >= CONTEXT - held).astype(np.int32)
    session = ort.InferenceSession(ir.to_proto(position_processor(manifest, CONTEXT)).SerializeToString())
    found = run(session, {"position_ids": positions[None], "held_tokens": columns[None]})
    for row in range(ar):
        for column in range(CONTEXT):
            is_open = column >= CONTEXT - held and column <= CONTEXT - ar + row
            assert found["attention_mask"][0, 0, row, column] == (65535 if is_open else 0)
    table = rope_tables(manifest)[""]
    cos, sin = (np.stack([table.rows(p, 1)[i][0] for p in positions.tolist()]) for i in (0, 1))
    assert np.array_equal(found["position_ids_cos"][0, 0], cos)
    assert np.array_equal(found["position_ids_sin"][0, 0], sin)


def test_the_dequantizer_keeps_every_two_logits_apart(small: Bundle) -> None:
    """Greedy choice is by integers in our loop and by floats in onnxruntime-genai."""
    encoding = small.manifest.encodings["logits"]
    vocab = small.manifest.model.vocab
    session = ort.InferenceSession(ir.to_proto(dequantizer(small.manifest)).SerializeToString())
    integers = np.arange(65536, dtype=np.uint16)
    rows = [integers[i : i + vocab] for i in range(0, 65536 - vocab, vocab)]
    floats = np.concatenate([run(session, {"logits": row[None, None]})["float_logits"][0, 0] for row in rows])
    assert np.array_equal(floats, encoding.dequantize(integers[: len(floats)]))
    assert (np.diff(floats) > 0).all()
