"""The head some rows of the vocabulary at a time: the same logits as the graphs', and no matrix of it whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgekv.bundle import open_bundle
from edgekv.graphs.decoder import layer_result
from edgekv.runtime import make_engine
from edgekv.runtime.load_options import EngineOptions
from edgekv.spec import EMBEDDING, HEAD, LOGITS, Config, describe
from exporters.checkpoint import columns
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.fold import EVERY, Floats, Rows
from exporters.inspect.head import BundleHead
from exporters.inspect.probe import Probe
from exporters.quantize.reference import Reference
from tests.support.checkpoints import ARCHITECTURES, config_of, write_checkpoint, write_sinking
from tests.support.exports import export_options, exported, exported_architecture
from tests.support.thorough import variants

VOCAB = 320
BLOCK = 100  # rows at a time: the last block has fewer


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_ROWS_AT_ONCE", BLOCK)


def joined(blocks: Iterator[list[Floats]]) -> list[Floats]:
    """Blocks of the vocabulary as whole rows of logits, by window."""
    found = [*blocks]
    assert [each[0].shape[1] for each in found] == [BLOCK, BLOCK, BLOCK, VOCAB % BLOCK]
    return [np.concatenate(parts, axis=1) for parts in zip(*found, strict=True)]


def check_head(folder: Path, windows: list[np.ndarray]) -> None:
    """The head on numpy gives the logits of its graph, but where a sum is halfway between two steps.

    Such a sum of the norm before it moves some logits of its row by up to 4 steps, or by a step before their cap, and
    the rounding of it.
    """
    bundle = open_bundle(folder)
    spec, encodings = bundle.manifest.model, bundle.manifest.encodings
    step, cap = encodings[LOGITS].scale, spec.logits_cap
    most = 4 * step if cap is None else cap * encodings["head.uncapped"].scale + step
    probe = Probe(bundle, make_engine(bundle, EngineOptions("cpu")))
    stages = [*probe.stages(windows)]
    of_last = stages[-2 * len(windows) : -len(windows)]
    states = [trace[layer_result(spec, spec.layers - 1)] for trace in of_last]
    for found, trace in zip(joined(BundleHead(bundle).blocks(states)), stages[-len(windows) :], strict=True):
        rest = found[probe.first :]
        np.testing.assert_allclose(rest, trace["logits"], atol=most, rtol=1e-6)
        assert (np.abs(rest - trace["logits"]) < step / 2).mean() > 0.95


def head_form(name: str) -> tuple[object, ...]:
    """What of an architecture its last norm and its head read."""
    spec = describe(Config(config_of(ARCHITECTURES[name])))
    norm = (spec.layer_norms, spec.norm_biases, spec.norm_weights, spec.norm_offset, spec.head_gain == 1)
    return (*norm, spec.logits_cap is None, spec.vocabulary, "lm_head" in spec.biased)


FORMS: dict[tuple[object, ...], str] = {}
for _name in ("gemma2", "qwen3", *sorted(ARCHITECTURES)):
    FORMS.setdefault(head_form(_name), _name)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", variants(FORMS.values(), ("gemma2", "qwen3")))
def test_the_head_on_numpy_gives_the_logits_of_the_graph(name: str) -> None:
    """An architecture of each form of heads."""
    check_head(exported_architecture(name), [np.arange(3, 40), np.arange(100, 109)])


@pytest.mark.usefixtures("small_blocks")
def test_the_logits_of_a_sink_come_first(tmp_path: Path) -> None:
    checkpoint = write_sinking(tmp_path, ARCHITECTURES["qwen3"])
    folder = exported(checkpoint, export_options(context=64, ar=(1, 16)))
    sink = open_bundle(folder).manifest.sink
    assert sink is not None
    check_head(folder, [np.array([*sink.tokens, 5, 6, 7, 8])])


@pytest.mark.usefixtures("small_blocks")
def test_no_matrix_of_the_vocabulary_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path, ARCHITECTURES["gemma2"])))
    windows = [np.arange(3, 40), np.arange(100, 109)]
    wanted = [*Reference(checkpoint, 64).logits(windows)]
    read = Checkpoint.tensor
    most = dict.fromkeys((EMBEDDING, HEAD), 0)

    def counted(self: Checkpoint, key: str, rows: Rows = EVERY) -> Floats:
        found = read(self, key, rows)
        if key in most:
            most[key] = max(most[key], len(found))
        return found

    monkeypatch.setattr(Checkpoint, "tensor", counted)
    reference = Reference(checkpoint, 64)
    for whole, found in zip(wanted, joined(reference.head_blocks(reference.states(windows))), strict=True):
        np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5)
    assert most == {EMBEDDING: len(windows[0]), HEAD: BLOCK}
