"""The ONNX graphs that a bundle's records describe, as the builder writes them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from devices import find
from edgekv.bundle import Bundle, GraphRecord, open_bundle
from edgekv.graphs import decoder
from edgekv.runtime import HtpEngine
from exporters.graphs.parts import build_part, save_part, stored_graph
from tests.support.bundles import Arrays, any_step, outputs
from tests.support.checkpoints import EVERY_OPERATION
from tests.support.exports import exported_architecture
from tests.support.thorough import variants


def _operations(bundle: Bundle, graph: GraphRecord) -> Counter[str]:
    return Counter(node.op_type for node in stored_graph(bundle.graph_path(graph)).graph.node)


def test_decode_multiplies_the_queries_that_share_keys_at_once(small: Path) -> None:
    bundle = open_bundle(small)
    spec = bundle.manifest.model
    decode, prefill = (next(g for g in bundle.manifest.graphs if g.role == role) for role in ("decode", "prefill"))
    assert (spec.heads, spec.kv_heads) == (4, 2)
    assert _operations(bundle, decode)["Softmax"] == spec.layers * spec.kv_heads
    assert _operations(bundle, prefill)["Softmax"] == spec.layers * spec.heads


def test_queries_that_share_keys_have_one_encoding(small: Path) -> None:
    encodings = open_bundle(small).manifest.encodings
    heads = [encodings[f"layers.0.q.h{head}.rotated"] for head in range(4)]
    assert heads[0] == heads[1] and heads[2] == heads[3] and heads[0] != heads[2]


@pytest.mark.htp
@pytest.mark.parametrize("architecture", variants(sorted(EVERY_OPERATION), {"llama-biased", "gemma2", "gemma4"}))
def test_folded_heads_have_the_bits_of_single_ones(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(exported_architecture(architecture))
    record = next(graph for graph in bundle.manifest.graphs if graph.role == "decode")
    part = record.parts[0]

    def run(folded_ar: int) -> Arrays:
        monkeypatch.setattr(decoder, "FOLDED_AR", folded_ar)
        graph = tmp_path / f"{folded_ar}" / "graph.onnx"
        graph.parent.mkdir()
        save_part(build_part(bundle.manifest, record, part), graph, bundle.path)
        return outputs(HtpEngine(find("SM8650")).load(graph, part.name), any_step(bundle, record, part))

    single, folded = run(0), run(record.ar)
    assert [name for name in single if not np.array_equal(single[name], folded[name])] == []
