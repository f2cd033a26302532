"""Graphs of two contexts over one strip: moving to the larger one changes nothing but the speed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgekv.bundle import GraphRecord, Manifest, open_bundle
from edgekv.engine import Engine, make_engine
from edgekv.engine.binding import MemoryBinding
from edgekv.engine.rope import RopeTable
from edgekv.kv.context_ladder import ContextLadder
from edgekv.kv.growing_arena import GrowingArena
from exporters.checkpoint import Checkpoint
from exporters.graphs import write_graphs

CONTEXTS = (16, 32)
TOKENS = [(37 * i) % 4000 + 3 for i in range(30)]


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    return open_bundle(bundle).manifest


@pytest.fixture(scope="module")
def graphs(manifest: Manifest, embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decode graph for each context, with one set of encodings."""
    folder = tmp_path_factory.mktemp("graphs")
    records = [GraphRecord(name=f"s{s}", file=f"s{s}.onnx", ar=1, context=s, role="decode") for s in CONTEXTS]
    encodings = {name: stored.encoding() for name, stored in manifest.encodings.items()}
    write_graphs(Checkpoint.open(str(embedded)), encodings, records, folder)
    return folder


def _logits(engine: Engine, graphs: Path, manifest: Manifest, ladder: ContextLadder) -> np.ndarray:
    """The logits after each token as integers `[T, V]`; each layer is bound where its own strip lies."""
    geometry = manifest.geometry
    names, row_bytes, per_layer = list(geometry.names()), geometry.row_bytes, 2 * geometry.kv_heads
    arena = GrowingArena(geometry, ladder)
    bindings = {s: MemoryBinding(engine.session(graphs / f"s{s}.onnx")) for s in ladder.contexts}
    rope = RopeTable(
        manifest.rope.inverse_frequencies,
        manifest.encodings["position_ids_cos"].encoding(),
        manifest.encodings["position_ids_sin"].encoding(),
    )
    logits = np.zeros((len(TOKENS), 1, 1, manifest.model.vocab), np.uint16)
    for held, token in enumerate(TOKENS):
        arena.begin(1)
        windows = [ladder.window(arena.home(layer), held, 1) for layer in range(geometry.layers)]
        context, seen = windows[0].context, windows[0].window
        mask = np.zeros((1, 1, 1, context), np.uint16)
        mask[..., seen.first : seen.stop] = mask[..., -1] = 65535
        cos, sin = rope.rows(held, 1)
        inputs = {
            "input_ids": np.array([[token]], np.int32),
            "attention_mask": mask,
            "position_ids_cos": cos[None, None].copy(),
            "position_ids_sin": sin[None, None].copy(),
        }
        binding = bindings[context]
        for name, array in inputs.items():
            binding.input_array(name, array)
        binding.output_array("logits", logits[held])
        for layer, each in enumerate(windows):
            buffer = arena.buffer(layer)
            tensors = names[layer * per_layer : (layer + 1) * per_layer]
            addresses = [row.ctypes.data for row in buffer]
            past, new = [1, 1, context - 1, geometry.head_dim], [1, 1, 1, geometry.head_dim]
            binding.inputs([t.past for t in tensors], buffer.dtype, past, addresses, each.window.past_row * row_bytes)
            binding.outputs([t.new for t in tensors], buffer.dtype, new, addresses, each.window.new_row * row_bytes)
        binding.run()
        arena.end(1)
    return logits[:, 0, 0]


@pytest.mark.parametrize("name", ["cpu", "htp"])
@pytest.mark.parametrize("spacing", [None, 1])
def test_moving_to_the_next_context_changes_no_token(
    graphs: Path, manifest: Manifest, name: str, spacing: int | None
) -> None:
    """Bit by bit the same on the HTP; on the CPU the longer row of attention weights is summed in another order."""
    engine = make_engine(name, device=manifest.device)
    layers = manifest.geometry.layers
    large = _logits(engine, graphs, manifest, ContextLadder(CONTEXTS[-1:], layers))
    climbed = _logits(engine, graphs, manifest, ContextLadder(CONTEXTS, layers, spacing))
    assert large.std() > 0
    if name == "htp":
        assert np.array_equal(large, climbed)
    assert np.array_equal(large.argmax(-1), climbed.argmax(-1))
