"""The vocabulary is stored once: the rows of a tied head's matrix are the embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from devices import find
from edgekv.bundle import Bundle, RecipeRecord, open_bundle
from edgekv.bundle.consistency import check_consistency
from edgekv.runtime import CpuEngine
from edgekv.spec import (
    EMBEDDING,
    EMBEDDING_COLUMNS,
    EMBEDDING_STEPS,
    HEAD,
    HEAD_TURN,
    Vocabulary,
    matrices,
    views,
)
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import transformed, transformed_as
from exporters.checkpoint.rotate import applied_rotation, shared_vocabulary
from exporters.graphs.parts import stored_graph
from exporters.htp.check import floating_nodes
from exporters.inspect.probe import Probe
from exporters.quantize.recipe import find_recipe
from exporters.quantize.reference import Reference
from exporters.quantize.table import Table
from tests.support.checkpoints import ARCHITECTURES, NEWER, write_checkpoint
from tests.support.exports import export_options, exported

TIED = sorted(name for name, each in ARCHITECTURES.items() if each.get("tie_word_embeddings", True))
TOKENS = np.arange(40)


def with_vocabulary(checkpoint: Checkpoint, vocabulary: Vocabulary) -> Checkpoint:
    return checkpoint.as_spec(msgspec.structs.replace(checkpoint.spec, vocabulary=vocabulary))


@pytest.fixture
def tied(tmp_path: Path) -> Bundle:
    return open_bundle(
        exported(write_checkpoint(tmp_path / "checkpoint", NEWER), export_options(context=64, ar=(1, 8)))
    )


@pytest.fixture
def untied(tmp_path: Path) -> Bundle:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", NEWER, {"tie_word_embeddings": False})
    return open_bundle(exported(checkpoint, export_options(context=64, ar=(1, 8))))


@pytest.mark.parametrize("architecture", TIED)
def test_a_shared_vocabulary_changes_no_logit(tmp_path: Path, architecture: str) -> None:
    """With gains of embeddings and logits, caps and norms behind the blocks; rotated where that is possible."""
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path, ARCHITECTURES[architecture])))
    if checkpoint.spec.layer_norms:
        assert not find_recipe("w8a16").shares_vocabulary(checkpoint.spec)
        return
    rotation = applied_rotation(checkpoint.spec, "hadamard")
    shared = with_vocabulary(checkpoint, shared_vocabulary(rotation))
    folded = transformed(shared, RecipeRecord(name="folded", rotation=rotation, weights=[]))
    exact, once = (next(Reference(each, 64).logits([TOKENS])) for each in (checkpoint, folded))  # type: ignore[arg-type]
    assert np.abs(exact - once).max() < 1e-4 * np.ptp(exact)
    np.testing.assert_array_equal(folded.tensor(EMBEDDING), folded.tensor(HEAD))
    assert (shared.spec.vocabulary == "turned") == (HEAD_TURN in matrices(shared.spec))


def test_what_turns_the_input_of_the_head_is_small(tmp_path: Path) -> None:
    """8 bits of it are far below those of the head."""
    checkpoint = with_vocabulary(Checkpoint.open(str(write_checkpoint(tmp_path, NEWER))), "turned")
    turn = transformed(checkpoint, RecipeRecord(name="folded", rotation="hadamard", weights=[])).tensor(HEAD_TURN)
    assert 0 < np.abs(turn).max() < 0.5
    assert not checkpoint.tensor(HEAD_TURN).any()


def test_a_tied_vocabulary_is_stored_once(tied: Bundle, untied: Bundle) -> None:
    places, spec = tied.manifest.weights, tied.manifest.model
    assert (spec.vocabulary, untied.manifest.model.vocabulary) == ("turned", "apart")
    assert EMBEDDING not in places.matrices and places.matrices[HEAD].by_outputs
    assert untied.manifest.weights.matrices[EMBEDDING].by_outputs
    assert not untied.manifest.weights.matrices[HEAD].by_outputs
    graph = stored_graph(tied.graph_path(tied.manifest.graphs[0])).graph
    stored = {each.name: {entry.key: entry.value for entry in each.external_data} for each in graph.initializer}
    assert stored["embedding.table"] == stored[f"{HEAD}.int8"]
    turn_bytes = places.bytes(HEAD_TURN)
    assert untied.manifest.weights.total_bytes - places.total_bytes == places.bytes(HEAD) - turn_bytes


@pytest.mark.parametrize("which", ["tied", "untied"])
def test_the_host_looks_up_what_graphs_do(which: str, request: pytest.FixtureRequest) -> None:
    bundle: Bundle = request.getfixturevalue(which)
    table = bundle.embeddings()
    trace = Probe(bundle, CpuEngine(threads=1)).run(TOKENS.tolist())
    np.testing.assert_array_equal(trace["embedding"], table.encoding.dequantize(table.rows(TOKENS)))


def test_embeddings_have_8_bits_a_row(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path, NEWER)))
    table, exact = Table.of(checkpoint), checkpoint.tensor(EMBEDDING)
    rounded = table.embeddings(np.arange(len(exact)))
    steps = np.abs(exact).max(axis=1, keepdims=True) / 127
    assert (np.abs(rounded - exact) <= 0.502 * steps).all()
    low, high = table.reach
    assert low == pytest.approx(exact.min()) and high == pytest.approx(exact.max())


def test_the_head_chooses_integers_of_the_table(tied: Bundle) -> None:
    """On the table's grid, but not to nearest: the logits lose less, and the host finds the same rows."""
    source = with_vocabulary(Checkpoint.open(tied.manifest.source.checkpoint), "turned")
    table, head = Table.of(transformed_as(tied, source)), tied.weights().matrix(HEAD)
    np.testing.assert_array_equal(head.scales, table.scales)
    moved = np.abs(head.integers.T.astype(np.int64) - table.integers(slice(None)))
    assert 0 < moved.mean() < 1 and moved.max() < 20


def test_a_row_of_zeros_stays_zero(tmp_path: Path) -> None:
    class Tensors:
        spec = Checkpoint.open(str(write_checkpoint(tmp_path, NEWER))).spec

        def tensor(self, key: str, rows: Any) -> np.ndarray[Any, Any]:
            table = np.zeros((self.spec.vocab, self.spec.hidden), np.float32)
            table[7] = 3.0
            found: np.ndarray[Any, Any] = table[rows]
            return found

    table = Table.of(Tensors())  # type: ignore[arg-type]
    assert not table.embeddings(np.array([6])).any()
    np.testing.assert_allclose(table.embeddings(np.array([7])), 3.0, rtol=1e-4)


def broken(bundle: Bundle, **changes: Any) -> str:
    """What is said of a manifest with other weights, or another model."""
    places, found = bundle.manifest.weights, list[str]()
    tensors, kept = dict(places.tensors), dict(places.matrices)
    for name, change in changes.pop("tensors", {}).items():
        tensors[name] = msgspec.structs.replace(tensors[name], **change)
    for name, change in changes.pop("matrices", {}).items():
        kept[name] = msgspec.structs.replace(kept[name], **change)
    for name in changes.pop("without", ()):
        tensors.pop(name, None), kept.pop(name, None)
    weights = msgspec.structs.replace(places, matrices=kept, tensors=tensors)

    def fail(field: str, got: object, wanted: object) -> Any:
        found.append(f"{field}: got {got}; expected {wanted}")
        raise ValueError

    with pytest.raises(ValueError):
        check_consistency(msgspec.structs.replace(bundle.manifest, weights=weights, **changes), fail)
    return found[0]


def test_a_table_in_the_wrong_place_is_refused(tied: Bundle, untied: Bundle) -> None:
    assert broken(tied, matrices={HEAD: {"by_outputs": False}}).endswith("expected int8 by outputs [320, 64]")
    assert "got int8 [320, 64] by outputs" in broken(untied, matrices={HEAD: {"by_outputs": True}})
    assert broken(untied, without=[EMBEDDING]).startswith(f"weights: {EMBEDDING}: got none")
    assert broken(tied, without=[HEAD_TURN]).startswith(f"weights: {HEAD_TURN}: got none")
    assert broken(tied, without=[EMBEDDING_STEPS]).startswith(f"weights: {EMBEDDING_STEPS}: got none")
    short = {EMBEDDING_STEPS: {"shape": (319, 1)}}
    assert broken(tied, tensors=short) == f"weights: {EMBEDDING_STEPS}: got [319, 1]; expected [320, 1]"


def test_a_head_of_its_own_cannot_share(untied: Bundle) -> None:
    with pytest.raises(ValueError, match="vocabulary: got shared; expected apart"):
        msgspec.structs.replace(untied.manifest.model, vocabulary="shared").__post_init__()


def test_the_matrix_before_the_head_learns_what_the_head_would() -> None:
    methods = {}
    for name, vocabulary in (("w8a16", "turned"), ("w4a16", "turned"), ("as-stored", "shared"), ("w4a16", "shared")):
        recipe = find_recipe(name).sharing_vocabulary(vocabulary)
        methods[name, vocabulary] = [recipe.rule(tensor).method for tensor in (HEAD_TURN, HEAD)]
    assert methods == {
        ("w8a16", "turned"): ["gptq", "gptq"],
        ("w4a16", "turned"): ["gptq", "gptq"],
        ("as-stored", "shared"): ["nearest", "nearest"],
        ("w4a16", "shared"): ["gptq", "nearest"],
    }


def test_a_head_of_4_bits_leaves_the_table_apart(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path, NEWER)))
    recipe = find_recipe("w4a16")
    assert recipe.shares_vocabulary(checkpoint.spec)
    narrow = msgspec.structs.replace(recipe, weights=recipe.weights[:1])
    assert not narrow.shares_vocabulary(checkpoint.spec)
    assert [view.name for view in views(checkpoint.spec)].count(HEAD_TURN) == 0


def with_an_outlier(folder: Path) -> Path:
    """A model that cannot be rotated, with a column of embeddings 100 times larger than the others."""
    write_checkpoint(folder, ARCHITECTURES["gemma3"])
    tensors = load_file(folder / "model.safetensors")
    table = tensors[EMBEDDING].astype(np.float32)
    table[:, 5] *= 100
    save_file(tensors | {EMBEDDING: table}, folder / "model.safetensors")
    return folder


def test_columns_far_larger_than_the_others_have_factors(tmp_path: Path) -> None:
    """They are powers of 2, and the host's embeddings stay those of graphs."""
    folder = with_an_outlier(tmp_path)
    plain, shared = Checkpoint.open(str(folder)), with_vocabulary(Checkpoint.open(str(folder)), "shared")
    exact, once = (next(Reference(each, 64).logits([TOKENS])) for each in (plain, shared))
    assert np.abs(exact - once).max() < 1e-4 * np.ptp(exact)
    found = Table.of(shared)
    assert found.columns is not None and found.columns[5] == 128 and set(np.log2(found.columns) % 1) == {0.0}
    rest = np.arange(64) != 5
    errors = np.square(found.embeddings(TOKENS) - shared.tensor(EMBEDDING, TOKENS))[:, rest]
    assert 10 * np.log10(np.square(shared.tensor(EMBEDDING, TOKENS))[:, rest].mean() / errors.mean()) > 30
    bundle = open_bundle(exported(folder, export_options(context=64, ar=(1, 8))))
    assert EMBEDDING_COLUMNS in bundle.manifest.weights.tensors
    trace, held = Probe(bundle, CpuEngine(threads=1)).run(TOKENS.tolist()), bundle.embeddings()
    np.testing.assert_array_equal(trace["embedding"], held.encoding.dequantize(held.rows(TOKENS)))
    assert "got [63]" in broken(bundle, tensors={EMBEDDING_COLUMNS: {"shape": (63,)}})
    lost = {name: each for name, each in bundle.manifest.encodings.items() if name != "embedding.columns"}
    assert broken(bundle, encodings=lost).startswith("encodings: embedding.columns: got none")


@pytest.mark.htp
def test_the_htp_multiplies_columns_in_integers(tmp_path: Path) -> None:
    folder = with_an_outlier(tmp_path)
    bundle = open_bundle(exported(folder, export_options(context=64, ar=(1, 8))))
    assert not floating_nodes([bundle.graph_path(bundle.manifest.graphs[0])], find("SM8650"))
