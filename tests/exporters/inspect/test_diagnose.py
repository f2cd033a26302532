"""Traces of every result, and the cause that a difference between two of them shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

import edgekv
from edgekv.bundle import open_bundle
from edgekv.errors import UsageError
from edgekv.kv import KvTensor
from edgekv.runtime import make_engine
from edgekv.runtime.load_options import EngineOptions
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import transformed_as
from exporters.inspect import Probe, Trace, find_divergence, read_trace, sqnr_db, trace_reference, write_trace
from exporters.inspect.trace import merged, trace_stages
from exporters.quantize.reference import NumpyOps
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported

TOKENS = [0, 17, 301, 44, 9, 1200, 77, 3, 512, 8, 90, 2047, 6, 31, 5, 700] * 5
SHORT = [i * i % 250 for i in range(40)]


def limited(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint.as_spec(msgspec.structs.replace(checkpoint.spec, limits=(8,)))


@pytest.fixture(scope="module")
def reference(bundle: Path, embedded: Path) -> Trace:
    return trace_reference(transformed_as(open_bundle(bundle), Checkpoint.open(str(embedded))), TOKENS)


def probe(folder: Path, engine: str) -> Probe:
    bundle = open_bundle(folder)
    return Probe(bundle, make_engine(bundle, EngineOptions(engine)))


@pytest.fixture(scope="module")
def on_htp(bundle: Path) -> Trace:
    return probe(bundle, "htp").run(TOKENS)


@pytest.mark.parametrize("engine", ["cpu", "htp"])
def test_every_result_of_a_graph_is_close_to_the_references(
    bundle: Path, reference: Trace, engine: str, request: pytest.FixtureRequest
) -> None:
    found = probe(bundle, "cpu").run(TOKENS) if engine == "cpu" else request.getfixturevalue("on_htp")
    assert set(reference) == set(found), "no part of a result is one of its own"
    assert find_divergence(reference, found, limit_db=20).first is None
    assert {found[name].shape for name in reference} == {reference[name].shape for name in reference}


@pytest.mark.htp
def test_the_probes_logits_are_those_of_the_loop(embedded_on_htp: Path, on_htp: Trace) -> None:
    np.testing.assert_array_equal(on_htp["logits"], edgekv.load(embedded_on_htp, engine="htp").score(TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "phi4-mini", "olmo2", "lfm2"])
def test_windows_other_rotary_embeddings_and_states_are_probed(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[name])))
    checkpoint = checkpoint.as_spec(checkpoint.spec.with_states("u8"))
    bits = 8 if name == "lfm2" else 16
    bundle = exported(checkpoint.folder, export_options(context=64, ar=(1, 8), state_bits=bits))
    probing = probe(bundle, "cpu")
    tokens = [(37 * i * i + 5 * i) % 250 for i in range(60)]
    wanted = trace_reference(transformed_as(open_bundle(bundle), checkpoint), tokens)
    found = probing.run(tokens)
    assert set(wanted) == set(found)
    assert sqnr_db(edgekv.load(bundle).score(tokens), found["logits"]) > 50
    assert find_divergence(wanted, found, limit_db=6).first is None  # random weights quantize badly


def test_a_trace_survives_its_file(tmp_path: Path, reference: Trace) -> None:
    write_trace(reference, tmp_path / "a.npz")
    again = read_trace(tmp_path / "a.npz")
    assert list(again) == list(reference)
    assert all(np.array_equal(again[name], reference[name]) for name in reference)


def damaged(reference: Trace, name: str, values: np.ndarray) -> Trace:
    """The reference with one result replaced, and all later ones spoilt, as they would be."""
    later = False
    trace = {}
    noise = np.random.default_rng(1)
    for each, good in reference.items():
        trace[each] = good + noise.normal(0, good.std() + 1e-6, good.shape).astype(np.float32) if later else good
        if each == name:
            trace[each], later = values, True
    return trace


@pytest.mark.parametrize(
    ("name", "spoil", "cause"),
    [
        ("layers.2.o", lambda x: 1.5 * x, "scale: the values are 1.5 x"),
        ("layers.1.k.h0.rotated", lambda x: turned(x, 0.01), "RoPE: pairs keep their length"),
        ("layers.1.q.h1.rotated", lambda x: np.concatenate((x[:1], x[1:, ::-1])), "RoPE: position 0 agrees"),
        ("layers.3.attention", lambda x: np.cumsum(x, 0) / np.arange(1, len(x) + 1)[:, None], "mask"),
        ("past_value_1_h0_in", lambda x: np.round(x / (x.std() * 2)) * x.std() * 2, "KV bits"),
        (
            "layers.0.up",
            lambda x: np.clip(x, -0.3 * np.abs(x).max(), 0.3 * np.abs(x).max()),
            "range: the values are clip",
        ),
        ("layers.0.down", lambda x: x * np.nan, "NaN or infinite"),
        ("layers.0.down", lambda x: x * 0, "nothing was written"),
        ("layers.2.gate", lambda x: x + np.roll(x, 1, axis=1), "weights or encoding"),
    ],
)
def test_the_first_difference_is_named_with_its_cause(reference: Trace, name: str, spoil, cause: str) -> None:
    found = find_divergence(reference, damaged(reference, name, spoil(reference[name]).astype(np.float32)))
    assert found.first == name
    assert found.cause is not None and cause in found.cause
    assert found.layer == (int(name.split("_")[2]) if name.startswith("past") else int(name.split(".")[1]))


class CoarseCache(NumpyOps):
    """Keys and values in 4 bits."""

    def append_to_cache(self, new: np.ndarray, tensor: KvTensor) -> np.ndarray:
        step = np.abs(new).max() / 7
        return super().append_to_cache(np.round(new / step) * step, tensor)


@pytest.mark.parametrize(
    ("wrong", "first", "cause"),
    [
        (lambda c: trace_reference(respelt(c, query_gain=0.5), SHORT), "layers.0.q.h0", "scale: the values are 2 "),
        (
            lambda c: trace_reference(turned_by(c, theta=9.0), SHORT),
            "layers.0.k.h0",
            "RoPE",
        ),
        (lambda c: trace_reference(limited(c), SHORT), "layers.0.attention", "mask"),
        (lambda c: merged(trace_stages(c, [np.array(SHORT)], None, CoarseCache)), "past_key_0_h0_in", "KV bits: the"),
    ],
)
def test_a_model_that_is_wrong_in_one_thing_is_told_from_the_right_one(tmp_path, wrong, first, cause) -> None:
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint")))
    found = find_divergence(trace_reference(checkpoint, SHORT), wrong(checkpoint))
    assert found.first is not None and found.first.startswith(first)
    assert found.cause is not None and found.cause.startswith(cause)


def turned_by(checkpoint: Checkpoint, theta: float) -> Checkpoint:
    """The checkpoint with another base of its rotary embedding."""
    return respelt(checkpoint, rope=msgspec.structs.replace(checkpoint.spec.rope, theta=theta))


def respelt(checkpoint: Checkpoint, **fields: Any) -> Checkpoint:
    return replace(checkpoint, spec=msgspec.structs.replace(checkpoint.spec, **fields))


def turned(x: np.ndarray, angle: float) -> np.ndarray:
    first, second = np.split(x, 2, axis=1)
    angles = angle * np.arange(len(x))[:, None] * np.linspace(3, 1, first.shape[1])
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1)


@given(st.floats(-40, 40), st.integers(0, 99))
def test_sqnr_is_the_ratio_of_powers(level: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    signal, noise = rng.normal(size=(2, 8, 16))
    noise *= np.linalg.norm(signal) / np.linalg.norm(noise) * 10 ** (-level / 20)
    assert sqnr_db(signal, signal + noise) == pytest.approx(level, abs=1e-6)


def test_traces_of_other_models_are_refused(tmp_path: Path, reference: Trace) -> None:
    with pytest.raises(UsageError, match="no result in both"):
        find_divergence(reference, {"other": np.ones((2, 2), np.float32)})
    with pytest.raises(UsageError, match=r"layers\.0\.o"):
        find_divergence(reference, {"layers.0.o": np.ones((2, 2), np.float32)})
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(UsageError, match=r"x\.npz"):
        read_trace(tmp_path / "x.npz")
