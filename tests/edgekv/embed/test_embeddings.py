"""Embeddings: folders of sentence-transformers, their bundles, `Model.embed`, `edgekv embed` and `/v1/embeddings`."""

from __future__ import annotations

import collections
import copy
import csv
import functools
import heapq
import itertools
import json
import random
import shutil
import statistics
import textwrap
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from openai import BadRequestError
from safetensors.numpy import load_file, save_file

import edgekv
from edgekv.bundle import open_bundle
from edgekv.cli import run
from edgekv.embed import pooled
from edgekv.errors import BundleError, CheckpointError, ContextFullError, EdgeKVWarning, UsageError
from exporters.capabilities import GENIE
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import export_bundle
from exporters.pipeline.task_quality import compared
from exporters.quantize.reference import Reference
from exporters.quantize.sink_request import SinkRequest
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.embedders import EMBEDDERS, GOLDEN, TEXTS, embedder_of, with_modules, write_embedder
from tests.support.exports import ROOT, export_options, exported, exported_architecture, small_options
from tests.support.serving import NAME, served
from tests.support.thorough import variants

KEPT = json.loads(GOLDEN.read_text())
NAMES = sorted(EMBEDDERS)
WHOLE_TEXTS = ("embeddinggemma", "embeddinggemma2")


def bundle_of(folder: Path, name: str = "qwen3-embedding", recipe: str = "w8a16", **options) -> Path:
    options = {"context": 64, "ar": (1,) if name in WHOLE_TEXTS else (1, 8), **options}
    return exported(write_embedder(folder / "checkpoint", name), export_options(recipe, **options))


def expected(name: str) -> np.ndarray:
    return np.array(KEPT[name]["embeddings"], np.float32)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def refused(folder: Path, name: str = "qwen3-embedding", **changes) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(str(write_embedder(folder / "changed", name, **changes)))
    return str(caught.value)


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_equals_sentence_transformers(tmp_path, name):
    checkpoint = Checkpoint.open(str(write_embedder(tmp_path, name)))
    for text, wanted in zip(TEXTS, expected(name), strict=True):
        (rows,) = Reference(checkpoint).logits([np.array(checkpoint.encode(text, around=True))])
        found = pooled(checkpoint.task, rows)
        assert np.abs(found - wanted).max() < 1e-4 * np.ptp(wanted)


def test_flags_of_older_releases_name_the_pooling(tmp_path):
    older = {"pooling_mode": None, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
    assert (
        Checkpoint.open(str(write_embedder(tmp_path, "qwen3-embedding", **{"1_Pooling": older}))).task.pooling == "mean"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"1_Pooling": {"pooling_mode": "weightedmean"}},
            "pooling_mode: got weightedmean; expected one of last",
        ),
        ({"1_Pooling": {"pooling_mode": ["mean", "max"]}}, "pooling_mode: got mean, max; expected one of"),
        ({"2_Dense": {"activation_function": "torch.nn.modules.activation.Tanh"}}, "activation_function: got torch.nn"),
        ({"2_Dense": {"bias": True}}, "bias: got True; expected false"),
        ({"2_Dense": {"in_features": 32}}, r"linear.weight: got shape [96, 64]; expected shape [96, 32]"),
    ],
)
def test_what_runs_behind_the_decoder_is_refused_by_name(tmp_path, changes, said):
    assert said in refused(tmp_path, "llama-mean", **changes)


def test_a_dense_layer_of_another_width_is_refused(tmp_path):
    folder = write_embedder(tmp_path, "llama-mean")
    (folder / "2_Dense" / "model.safetensors").write_bytes((folder / "3_Dense" / "model.safetensors").read_bytes())
    file = folder / "2_Dense" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"in_features": 96, "out_features": 48}))
    with pytest.raises(CheckpointError, match=r"got shape \[48, 96\]; expected \[out, 64\]"):
        Checkpoint.open(str(folder))


def test_modules_in_another_order_are_refused(tmp_path):
    folder = write_embedder(tmp_path, "qwen3-embedding")
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.LayerNorm"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="got Transformer, Pooling, LayerNorm; expected Transformer, Pooling"):
        Checkpoint.open(str(folder))


def test_a_base_model_without_modules_is_refused(tmp_path):
    folder = write_embedder(tmp_path, "qwen3-embedding")
    (folder / "modules.json").unlink()
    with pytest.raises(CheckpointError, match=r"base model without a head.*modules\.json"):
        Checkpoint.open(str(folder))


# ---------------------------------------------------------------------- bundles


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_of_8_bits_keeps_the_direction(tmp_path, name):
    with edgekv.load(bundle_of(tmp_path, name)) as model:
        found = model.embed(TEXTS)
    assert found.shape == expected(name).shape
    assert cosines(found, expected(name)).min() > 0.999


@pytest.mark.parametrize("recipe", ["w4a16", "w4a16-lpbq32"])
@pytest.mark.parametrize("name", WHOLE_TEXTS)
def test_a_bundle_of_4_bits_nearly_keeps_the_direction(tmp_path, name, recipe):
    with edgekv.load(bundle_of(tmp_path, name, recipe)) as model:
        assert 0.99 < cosines(model.embed(TEXTS), expected(name)).mean() < 0.9999


@pytest.mark.parametrize(("recipe", "least"), variants([("w8a16", 0.999), ("w4a16", 0.99)], [("w4a16", 0.99)]))
@pytest.mark.slow
def test_an_export_measures_embeddings_of_a_trained_model(tmp_path, recipe, least):
    folder = embedder_of(ROOT / "models" / "stdlib-4m", tmp_path / "checkpoint")
    options = small_options(recipe, context=64, ar=(1, 8), check_quality=True, calibration_tokens=4096)
    manifest = export_bundle(Checkpoint.open(str(folder)), tmp_path / "bundle", options)
    assert manifest.task_quality.texts > 40 and manifest.task_quality.cosine > least
    assert manifest.task_quality.min_cosine < 1 - 1e-6, "they were compared with something else"


@pytest.mark.slow
def test_a_search_of_the_standard_library_ranks_alike(tmp_path):
    """The beginnings of docstrings look for their ends: the order of all ends is that of the float model."""
    modules = (collections, copy, csv, functools, heapq, itertools, json, random, shutil, statistics, textwrap)
    found = [
        " ".join(each.__doc__.split())
        for module in modules
        for name, each in sorted(vars(module).items())
        if callable(each) and isinstance(each.__doc__, str) and each.__module__ == module.__name__ and name[0] != "_"
    ]
    long = [text for text in found if len(text) > 120][:40]
    texts = [text[at : at + 60] for at in (60, 0) for text in long]
    folder = embedder_of(ROOT / "models" / "stdlib-4m", tmp_path / "checkpoint")
    checkpoint = Checkpoint.open(str(folder))
    windows = [np.array(checkpoint.encode(text, around=True)) for text in texts]
    exact = np.stack([pooled(checkpoint.task, rows) for rows in Reference(checkpoint).logits(windows)])
    with edgekv.load(exported(folder, export_options(context=64, ar=(1, 8)))) as model:
        actual = model.embed(texts)
    half, ranks = len(texts) // 2, list[np.ndarray]()
    for vectors in (exact, actual):
        ranks.append((vectors[half:] @ vectors[:half].T).argsort(-1).argsort(-1))
    agreement = [np.corrcoef(one, other)[0, 1] for one, other in zip(*ranks, strict=True)]
    assert len(texts) == 80 and np.mean(agreement) > 0.998
    assert (ranks[0].argmax(-1) == ranks[1].argmax(-1)).mean() > 0.9


def test_a_lost_direction_is_a_low_cosine():
    drawn = np.random.default_rng(0)
    exact = drawn.standard_normal((20, 32)).astype(np.float32)
    same, other = compared(exact, 3 * exact), compared(exact, drawn.standard_normal((20, 32)).astype(np.float32))
    assert (same.cosine, same.same_first) == (pytest.approx(1), 1) and other.cosine < 0.3
    assert compared(exact, np.zeros_like(exact)).cosine == 0


@pytest.mark.htp
@pytest.mark.parametrize("name", NAMES)
def test_the_htp_gives_the_same_embeddings_in_integers_alone(tmp_path, name):
    options = export_options(context=64, ar=(1,) if name in WHOLE_TEXTS else (1, 8), check_on_htp=True)
    bundle = exported(write_embedder(tmp_path, name), options, compiled=True)
    assert open_bundle(bundle).manifest.htp_check == "integers-only"
    with edgekv.load(bundle) as model, edgekv.load(bundle, "htp") as other:
        assert cosines(model.embed(TEXTS), other.embed(TEXTS)).min() > 0.9999


def test_a_bundle_for_text_only_runtimes_is_refused(tmp_path):
    with pytest.raises(BundleError, match="task: got an embedder's bundle; expected a model that writes text"):
        GENIE.check(open_bundle(bundle_of(tmp_path)))


@pytest.mark.parametrize(
    "options", [{"target_mb": 1.0}, {"give_hidden": True}, {"draft_rows": (8,)}], ids=lambda each: next(iter(each))
)
def test_options_that_need_a_head_for_text_are_refused(tmp_path, options):
    checkpoint = Checkpoint.open(str(write_embedder(tmp_path / "checkpoint", "qwen3-embedding")))
    with pytest.raises(UsageError, match="got it, for an embedder's bundle; expected a checkpoint that writes text"):
        export_bundle(checkpoint, tmp_path / "bundle", small_options(context=64, ar=(1, 8), **options))


# ---------------------------------------------------------------------- attention to both sides


def test_a_text_runs_in_the_shortest_graph_that_has_room_for_it(tmp_path):
    lengths, texts = (32, 64), [*TEXTS, "abc" * 20]
    with edgekv.load(bundle_of(tmp_path, "embeddinggemma", context=lengths)) as model:
        for text in texts:
            before = {graph.ar: graph.steps for graph in model.engine.graphs.loaded}
            found = model.embed([text])[0]
            steps = {graph.ar: graph.steps - before.get(graph.ar, 0) for graph in model.engine.graphs.loaded}
            assert steps[32 if len(text) < 32 else 64] == 1 == sum(steps.values())
            assert text not in TEXTS or cosines(found, expected("embeddinggemma")[TEXTS.index(text)]) > 0.999
        assert cosines(model.embed(texts), np.concatenate([model.embed([text]) for text in texts])).min() > 0.9999


@pytest.mark.parametrize(("name", "more"), [("embeddinggemma", set()), ("embeddinggemma2", {"layer_inputs"})])
def test_graphs_of_whole_texts_have_no_cache(tmp_path, name, more):
    manifest = open_bundle(bundle_of(tmp_path, name, context=(32, 64))).manifest
    assert [(graph.ar, graph.role) for graph in manifest.graphs] == [(32, "verify"), (64, "verify"), (64, "score")]
    for graph in manifest.graphs:
        kinds = {
            port.kind for port in (*manifest.interface.graph(graph).inputs, *manifest.interface.graph(graph).outputs)
        }
        assert kinds == {"ids", "mask", "cos", "sin", "logits", *more}


@pytest.mark.parametrize("name", WHOLE_TEXTS)
@pytest.mark.parametrize("mode", ["fast", "exact16"])
def test_other_modes_of_the_cpu_attend_to_both_sides(tmp_path, name, mode):
    with edgekv.load(bundle_of(tmp_path, name), cpu_mode=mode) as model:
        assert cosines(model.embed(TEXTS), expected(name)).min() > 0.999


def test_a_model_without_its_projection_is_refused(tmp_path):
    file = write_embedder(tmp_path, "embeddinggemma2") / "model.safetensors"
    whole = load_file(file)
    for tensor, said in ((None, "got none"), (whole["embedding_projection.weight"][:40], r"got shape \[40, 64\]")):
        tensors = {key: each for key, each in whole.items() if key != "embedding_projection.weight"}
        save_file(tensors if tensor is None else tensors | {"embedding_projection.weight": tensor}, file)
        with pytest.raises(CheckpointError, match=rf"embedding_projection\.weight.*{said}; expected shape \[48, 64\]"):
            Checkpoint.open(str(tmp_path))


def test_a_text_model_beside_encoders_is_the_same_embedder(tmp_path):
    """As transformers writes the whole model: the text model's fields and tensors have places of their own."""
    folder, text = write_embedder(tmp_path, "embeddinggemma2"), KEPT["embeddinggemma2"]["files"]["config.json"]
    own = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id")
    whole = {"architectures": ["EmbeddingGemma2Model"], "model_type": "embedding_gemma2", "text_config": text}
    whole |= {f"{name}_token_id": 300 + at for at, name in enumerate(("boi", "eoi", "image", "video", "boa", "audio"))}
    whole |= {"eoa_token_index": 310, "vision_config": None, "audio_config": None, "initializer_range": 0.02}
    (folder / "config.json").write_text(json.dumps({name: text[name] for name in own} | whole))
    tensors = load_file(folder / "model.safetensors")
    save_file({f"language_model.{key}": each for key, each in tensors.items()}, folder / "model.safetensors")
    checkpoint = Checkpoint.open(str(folder))
    for each, wanted in zip(TEXTS, expected("embeddinggemma2"), strict=True):
        (rows,) = Reference(checkpoint).logits([np.array(checkpoint.encode(each, around=True))])
        assert np.abs(pooled(checkpoint.task, rows) - wanted).max() < 1e-4 * np.ptp(wanted)


@pytest.mark.parametrize("reproducible", [False, True])
def test_an_embedding_does_not_depend_on_the_texts_beside_it(tmp_path, reproducible):
    with edgekv.load(bundle_of(tmp_path, "embeddinggemma"), reproducible=reproducible) as model:
        other = ["x" * 9, *TEXTS, "y" * 7]
        assert (model.embed(other)[1:-1] == model.embed(TEXTS)).all()


def test_a_model_of_text_that_attends_to_both_sides_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path, EMBEDDERS["embeddinggemma"].fields)
    with pytest.raises(
        CheckpointError, match="use_bidirectional_attention: got True; expected a folder of sentence-tr"
    ):
        Checkpoint.open(str(folder))


def test_lengths_are_contexts_not_steps(tmp_path):
    checkpoint = Checkpoint.open(str(write_embedder(tmp_path / "checkpoint", "embeddinggemma")))
    with pytest.raises(UsageError, match=r"--ar: got 1,8, for a model whose tokens attend to both sides.*--context"):
        export_bundle(checkpoint, tmp_path / "bundle", small_options(context=64, ar=(1, 8)))


@pytest.mark.parametrize(
    ("option", "changes"),
    [("--sink", {"sink": SinkRequest("tokens", (256,))}), ("--max-attention-window", {"max_attention_window": (40,)})],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_options_of_a_cache_are_refused_where_nothing_is_cached(tmp_path, option, changes):
    checkpoint = Checkpoint.open(str(write_embedder(tmp_path / "checkpoint", "embeddinggemma")))
    with pytest.raises(UsageError, match=f"{option}: got it, for a model whose tokens attend to both sides"):
        export_bundle(checkpoint, tmp_path / "bundle", small_options(context=64, ar=(1,), **changes))


def test_what_needs_a_cache_refuses_an_embedder_without_one(tmp_path, capsys):
    bundle = bundle_of(tmp_path, "embeddinggemma")
    for command in ("size", "plan"):
        for place in (bundle, tmp_path / "checkpoint"):
            assert run([command, str(place), *(["--device", "SM8650"] if command == "plan" else [])]) == 2
            assert "got attention to both sides, which keeps no cache" in capsys.readouterr().err
    with edgekv.load(bundle) as model, pytest.raises(UsageError, match=r"expected whole texts of `Model\.embed`"):
        model.score([1, 2])
    assert run(["generate", str(bundle), "--prompt", "a"]) == 2
    assert "got an embedder's bundle, which writes no text" in capsys.readouterr().err
    assert run(["info", str(bundle)]) == 0
    assert "both sides" in capsys.readouterr().out


@pytest.mark.slow
def test_an_export_measures_embeddings_of_whole_texts(tmp_path):
    checkpoint = Checkpoint.open(str(write_embedder(tmp_path / "own", "embeddinggemma")))
    options = small_options("w8a16", context=64, ar=(1,), check_quality=True)
    quality = export_bundle(checkpoint, tmp_path / "bundle", options).task_quality
    assert quality.cosine > 0.999 and quality.min_cosine < 1 - 1e-7


# ---------------------------------------------------------------------- Model.embed


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    with edgekv.load(bundle_of(tmp_path_factory.mktemp("embedder"))) as model:
        yield model


def test_texts_that_begin_alike_have_the_same_bits_alone(embedder):
    texts = ["Find: one", "Find: two", "Find: one and two", "a"]
    together = embedder.embed(texts)
    assert (together == np.concatenate([embedder.embed([text]) for text in texts])).all()


@pytest.mark.parametrize("name", NAMES)
def test_short_texts_share_passes(tmp_path, name):
    texts = [f"{number:02}" for number in range(40)]
    with edgekv.load(bundle_of(tmp_path, name)) as model:
        together, passes = model.embed(texts), model.engine.graphs.times.steps
        assert (together == np.concatenate([model.embed([text]) for text in texts])).all()
    assert passes <= 40 * len(texts[0] + "x") / 8 + 10, "they took a pass each"


def test_a_shared_prompt_is_run_once(embedder):
    before = embedder.engine.graphs.times.steps
    embedder.embed([f"{number:02}" for number in range(16)], prompt_name="query")  # 6 + 3 tokens each
    assert embedder.engine.graphs.times.steps - before <= 1 + 16 / 2


@pytest.mark.parametrize("name", ["gemma3", "lfm2", "qwen3_5"])
def test_texts_share_passes_in_every_kind_of_layer(tmp_path, name):
    """With windows, with convolutions; those of a gated delta rule mix all rows, so that each text runs alone."""
    write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[name], gain=1.0, dtype=np.float32)
    files = {path: each for path, each in KEPT["qwen3-embedding"]["files"].items() if path != "config.json"}
    folder, texts = with_modules(tmp_path / "checkpoint", files), ["one", "two", "and", "a text of several passes"]
    with edgekv.load(exported(folder, export_options(context=64, ar=(1, 8)))) as model:
        together = model.embed(texts)
        alone = np.concatenate([model.embed([text]) for text in texts])
        assert cosines(together, alone).min() > 0.99999
        assert (model.engine.branch_rows == 0) == (name == "qwen3_5")


@pytest.mark.htp
def test_texts_that_share_a_pass_have_the_same_bits_on_the_htp(tmp_path):
    options = export_options(context=64, ar=(1, 8), check_on_htp=True)
    texts = ["one", "two", "three", "4", "five texts", "Find: one", "Find: two"]
    bundle = exported(write_embedder(tmp_path, "qwen3-embedding"), options, compiled=True)
    with edgekv.load(bundle, "htp") as model:
        assert (model.embed(texts) == np.concatenate([model.embed([text]) for text in texts])).all()


def test_the_beginning_of_a_text_is_not_run_again(embedder):
    embedder.embed(["The same long beginning of a text, and one"])
    before = embedder.engine.graphs.times.steps
    embedder.embed(["The same long beginning of a text, and two"])
    assert embedder.engine.graphs.times.steps - before <= 3


def test_fewer_dimensions_are_the_first_ones_normalized(embedder):
    whole, cut = embedder.embed(TEXTS), embedder.embed(TEXTS, dimensions=16)
    first = whole[:, :16]
    assert np.allclose(cut, first / np.linalg.norm(first, axis=1, keepdims=True), atol=1e-6)


def test_a_prompt_goes_in_front_of_texts(embedder):
    assert (embedder.embed(["one"], prompt_name="query") == embedder.embed(["Find: one"])).all()


def test_a_text_that_is_cut_keeps_its_last_token(embedder):
    long = "abcdefgh" * 20
    with pytest.warns(EdgeKVWarning, match=r"texts\[1\]: its end was left out, 97 tokens or more; and that of 1 of"):
        cut = embedder.embed(["a", long, long], truncate=True)
    assert (cut[1:] == embedder.embed([long[:63]])).all()
    with pytest.raises(ContextFullError, match=r"texts\[1\]: got 161 tokens; expected at most 64"):
        embedder.embed(["a", long])


def test_the_length_that_the_checkpoint_names_is_the_longest(tmp_path):
    checkpoint = write_embedder(tmp_path, "qwen3-embedding", sentence_bert={"max_seq_length": 32})
    with edgekv.load(exported(checkpoint, export_options(context=64, ar=(1, 8)))) as model:
        with pytest.raises(ContextFullError, match="got 41 tokens; expected at most 32"):
            model.embed(["x" * 40])
        with pytest.warns(EdgeKVWarning, match="9 tokens or more$"):
            assert (model.embed(["x" * 40], truncate=True) == model.embed(["x" * 31])).all()


@pytest.mark.parametrize(
    ("texts", "options", "said"),
    [
        ([""], {}, r"texts\[0\]: got an empty text"),
        ("abc", {}, "texts: got a text; expected a list"),
        (["a"], {"dimensions": 65}, "dimensions: got 65; expected 1 to 64"),
        (["a"], {"dimensions": 0}, "dimensions: got 0; expected 1 to 64"),
        (["a"], {"prompt_name": "x"}, "prompt_name: got 'x'; expected one of document, query"),
    ],
)
def test_bad_input_is_named(embedder, texts, options, said):
    with pytest.raises(UsageError, match=said):
        embedder.embed(texts, **options)


def test_bundles_of_the_other_kind_are_named(embedder):
    with pytest.raises(UsageError, match=r"got an embedder's bundle, which writes no text.*edgekv embed"):
        embedder.generate("a")
    said = "got a bundle that writes text; expected an embedder's"
    with edgekv.load(exported_architecture("qwen3")) as model, pytest.raises(UsageError, match=said):
        model.embed(["a"])


# ---------------------------------------------------------------------- edgekv embed


def test_the_command_prints_a_vector_a_line(embedder, tmp_path, capsys):
    bundle, wanted = str(embedder.bundle.path), embedder.embed(["one", "two"])
    assert run(["embed", bundle, "--text", "one", "--text", "two"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert (np.array([json.loads(line) for line in printed], np.float32) == wanted).all()
    (tmp_path / "texts.txt").write_text("one\ntwo\n")
    assert run(["embed", bundle, "--file", str(tmp_path / "texts.txt"), "-o", str(tmp_path / "found.npy")]) == 0
    assert (np.load(tmp_path / "found.npy") == wanted).all()


# ---------------------------------------------------------------------- /v1/embeddings


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(bundle_of(tmp_path_factory.mktemp("served"))) as found:
        yield found


def test_the_openai_client_gets_what_the_library_gives(server, embedder):
    texts = [f"text {number}" for number in range(9)]  # more than there are sessions
    client, wanted = server.client(), embedder.embed(texts)
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model=NAME, input=texts, **options)
        found = [each.embedding for each in answer.data]
        if options.get("encoding_format") == "base64":
            found = [np.frombuffer(b64decode(each), "<f4") for each in found]
        assert (np.array(found, np.float32) == wanted).all()
        assert [each.index for each in answer.data] == [*range(9)]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 9 * 7
    cut = client.embeddings.create(model=NAME, input="text 0", dimensions=8).data[0].embedding
    assert (np.array(cut, np.float32) == embedder.embed(["text 0"], dimensions=8)[0]).all()


def test_the_server_embeds_whole_texts(tmp_path):
    bundle = bundle_of(tmp_path, "embeddinggemma", context=(32, 64))
    texts = [f"text {number}" for number in range(30)]
    with served(bundle) as server, edgekv.load(bundle) as model:
        answer = server.client().embeddings.create(model=NAME, input=texts, extra_body={"prompt_name": "query"})
        wanted = model.embed(texts, prompt_name="query")
    assert (np.array([each.embedding for each in answer.data], np.float32) == wanted).all()


def test_a_client_says_how_long_texts_may_be(server, embedder):
    long, client = "abcdefgh" * 20, server.client()
    for tokens, length in ((-1, 63), (99, 63), (10, 9)):
        fields = {"truncate_prompt_tokens": tokens, "prompt_name": "document"}
        answer = client.embeddings.create(model=NAME, input=[long, "short"], extra_body=fields)
        wanted = embedder.embed([long[:length], "short"])
        assert (np.array([each.embedding for each in answer.data], np.float32) == wanted).all()
        assert answer.usage.total_tokens == length + 1 + 6


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": "abc", "extra_body": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens: got 0; expected -1"),
        ({"input": "abc", "extra_body": {"truncate_prompt_tokens": 1}}, "got 4 tokens; expected at least one token of"),
        ({"input": []}, "input: got an empty list"),
        ({"input": ["a", ""]}, r"input[1]: got an empty text"),
        ({"input": "x" * 100}, "input: got 101 tokens; expected at most 64"),
        ({"input": "a", "dimensions": 65}, "dimensions: got 65; expected 1 to 64"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format: got 'int8'; expected float or base64"),
        ({"input": [1, 320]}, "input: got id 320; expected 0 to 319"),
        ({"input": "a", "extra_body": {"prompt_name": "x"}}, "prompt_name: got 'x'"),
        ({"input": "a", "extra_body": {"input_type": "query"}}, "input_type: got a text"),
    ],
)
def test_requests_that_cannot_be_answered_name_the_field(server, fields, said):
    with pytest.raises(BadRequestError) as caught:
        server.client().embeddings.create(model=NAME, **fields)
    assert said in str(caught.value)


def test_an_embedder_answers_no_chat(server):
    with pytest.raises(BadRequestError, match="an embedder's bundle, which writes no text"):
        server.client().completions.create(model=NAME, prompt="a")
