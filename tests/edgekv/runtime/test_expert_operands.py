"""Experts as operands: divided decode graphs follow the whole one, and read chosen experts alone."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import edgekv
from devices import find
from edgekv.bundle import all_compiled, open_bundle
from edgekv.cli import run
from edgekv.engine.session import Graphs, Session
from edgekv.errors import BundleError
from edgekv.graphs.onnx_session import PROVIDERS, session_options
from edgekv.kv import KVCache
from edgekv.runtime.expert_operands import ExpertOperands
from edgekv.runtime.htp import HtpEngine
from edgekv.spec import ExpertSteps
from exporters.graphs.divided import write_divided
from exporters.htp.check import floating_nodes
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported

PROMPT = [*range(20, 60)]


def mixture(folder: Path, name: str, recipe: str = "w8a16") -> Path:
    checkpoint = write_checkpoint(folder / "checkpoint", ARCHITECTURES[name], gain=1.0)
    (folder / "text").write_text("The quick brown fox jumps over the lazy dog, then sleeps until noon.")
    return exported(checkpoint, export_options(recipe, context=64, ar=(1, 16), calibration=folder / "text"))


@dataclass(frozen=True, slots=True)
class OnCpu(HtpEngine):
    """Runs divided graphs on ONNX Runtime's processor kernels, in the same way as on the HTP."""

    folder: Path = field(kw_only=True)

    def session(self, graph: Path) -> ort.InferenceSession:
        return ort.InferenceSession(self.folder / graph.name, session_options(self.folder, 1), providers=PROVIDERS)


def sqnr_db(exact: np.ndarray, found: np.ndarray) -> np.ndarray:
    lost = np.square(exact - found).sum(-1)
    return 10 * np.log10(np.square(exact).sum(-1) / np.maximum(lost, 1e-30))


@pytest.mark.parametrize("recipe", ["w8a16", "w4a16"])
@pytest.mark.parametrize("name", ["granitemoe", "lfm2_moe", "olmoe", "qwen3_moe"])
def test_divided_graphs_follow_the_whole_one(tmp_path, name, recipe):
    """A near tie of a random router may go the other way, as between HTP and CPU."""
    bundle = open_bundle(mixture(tmp_path, name, recipe))
    (folder := tmp_path / "divided").mkdir()
    manifest = bundle.manifest
    _, steps = write_divided(bundle, folder)
    operands = ExpertOperands(bundle, steps)
    engine = OnCpu(find("SM8650"), operands=operands, folder=folder)
    encodings = [manifest.encodings[tensor.past] for tensor in manifest.cache_geometry.names()]
    cache = KVCache(manifest.cache_geometry, ar=(1,), encodings=encodings)
    session, logits = Session(cache, Graphs(bundle, engine, cache)), manifest.encodings["logits"]
    with edgekv.load(bundle.path, cpu_mode="emulate") as whole:
        rows = [
            [logits.dequantize(each.feed((token,))).ravel() for token in PROMPT] for each in (whole.session, session)
        ]
    losses = sqnr_db(*map(np.array, rows))
    assert np.median(losses) > 38 and (losses > 20).mean() > 0.85
    (graph,) = operands.graphs.values()
    layers = manifest.model.experts.layers
    assert sum(part.routes for part in graph.parts) == len(layers)
    assert len(engine._sessions) == len(layers) + 2, "one graph has the experts of all layers"
    held = manifest.model.experts.count * len(layers) * 3 * manifest.model.experts.intermediate * manifest.model.hidden
    assert held <= operands.held_bytes < 1.1 * held


def test_the_host_reads_the_integers_of_the_bundle(tmp_path):
    bundle = open_bundle(mixture(tmp_path, "granitemoe"))
    (folder := tmp_path / "divided").mkdir()
    operands = ExpertOperands(bundle, write_divided(bundle, folder)[1])
    first = operands.load(None)
    assert operands.load(None) == first
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    weight = bundle.weights().matrix(name)
    place = next(place for place in operands.places if place.port.name == "up_0")
    at = operands.offset(1, 5) + place.offset
    stored = operands._memory.reshape(-1)[at : at + weight.integers.size].reshape(weight.integers.shape)
    assert np.array_equal(stored.astype(int) - 128, weight.integers)


@pytest.mark.parametrize(
    ("name", "recipe", "options", "words"),
    [
        ("llama-2", "w8a16", [], ["--experts", "a model without experts"]),
        ("granitemoe", "w4a16-lpbq32", [], ["--experts", "lpbq32", "model.layers.0.mlp.experts.0", "w8a16 or w4a16"]),
        ("granitemoe", "w8a16", ["--estimate"], ["--estimate", "--experts operands"]),
    ],
)
def test_what_cannot_be_divided_is_refused(tmp_path, capsys, name, recipe, options, words):
    bundle = mixture(tmp_path, name, recipe)
    assert run(["compile", str(bundle), "--device", "SM8650", "--experts", "operands", *options]) == 2
    error = capsys.readouterr().err
    assert [word for word in words if word not in error] == []
    assert not (bundle / "compiled").exists()


def test_binaries_with_experts_of_a_model_without_are_refused(tmp_path):
    with pytest.raises(BundleError, match="expert_steps: got them for a model without experts"):
        ExpertOperands(open_bundle(mixture(tmp_path, "llama-2")), ExpertSteps(gate=1.0, up=1.0, down=1.0))


@pytest.mark.slow
@pytest.mark.htp
@pytest.mark.parametrize("name", ["granitemoe", "lfm2_moe", "mellum", "olmoe", "qwen3_moe"])
def test_divided_graphs_are_integers_alone(tmp_path, name):
    bundle = open_bundle(mixture(tmp_path, name))
    (folder := tmp_path / "divided").mkdir()
    files, _ = write_divided(bundle, folder)
    assert floating_nodes([*files.values()], find("SM8650")) == []


@pytest.mark.htp
def test_a_trained_mixture_writes_the_same_text_with_experts_as_operands(tmp_path, embedded, capsys):
    """Divided at the routers, compiled for a chip, on the HTP emulator: integers alone, the tokens of `emulate`."""
    text = embedded / "heldout.txt"
    folder = tmp_path / "bundle"
    shutil.copytree(exported(embedded.parent / "experts-900k", export_options(context=512, ar=(1, 64))), folder)
    capsys.readouterr()
    assert run(["compile", str(folder), "--device", "SM8650", "--experts", "operands", "--quiet"]) == 0
    assert "experts are inputs of decode graphs: 602.1 kB in memory" in capsys.readouterr().out
    (compiled,) = [found.manifest for found in all_compiled(open_bundle(folder))]
    assert compiled.floating_nodes == []
    (graph,) = ExpertOperands(open_bundle(folder), compiled.expert_steps).graphs.values()
    assert [part.routes for part in graph.parts] == [True] * 3 + [False]
    found, written = [], []
    for engine in "cpu", "htp":
        with edgekv.load(folder, engine) as model:
            logits = model.bundle.manifest.encodings["logits"]
            tokens = model.bundle.tokenizer().encode(text.read_text()).ids[:80]
            prompt = tokens[:64]
            written.append([token.id for token in model.generate(prompt, max_new_tokens=16, ignore_eos=True)])
            model.cache.reset()
            model.session.tokens.clear()
            found.append(np.stack([logits.dequantize(model.session.feed((token,))).ravel() for token in tokens]))
            name, parts = model.engine.name, sorted(len(loaded.record.parts) for loaded in model.session._graphs.loaded)
    assert written[0] == written[1]
    losses = sqnr_db(*found)
    assert np.median(losses) > 45 and losses.min() > 25
    assert (name, parts) == ("htp-operands", [1, 4])
