"""Rerankers: checkpoints in the form of sentence-transformers, `Model.rerank`, `edgekv rerank` and `/v1/rerank`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import edgekv
from edgekv.bundle import open_bundle
from edgekv.cli import run
from edgekv.embed import activated, pair_tokens
from edgekv.errors import CheckpointError, ContextFullError, EdgeKVWarning, UsageError
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import export_bundle
from exporters.pipeline.task_quality import compared_scores
from exporters.quantize.reference import Reference
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.embedders import (
    GOLDEN,
    INSTRUCTION,
    PAIRS,
    PUBLISHED,
    RERANKERS,
    write_embedder,
    write_published_reranker,
    write_reranker,
)
from tests.support.exports import export_options, exported, exported_architecture, small_options
from tests.support.serving import NAME, served

KEPT = json.loads(GOLDEN.read_text())
NAMES = sorted(RERANKERS)
DOCUMENTS = ["one document", "another one", "a third document, longer than both", "4"]


def bundle_of(folder: Path, name: str = "qwen3-reranker", recipe: str = "w8a16", **options) -> Path:
    options = {"context": 128, "ar": (1, 8), **options}
    return exported(write_reranker(folder / "checkpoint", name), export_options(recipe, **options))


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_equals_sentence_transformers(tmp_path, name):
    checkpoint, wanted = Checkpoint.open(str(write_reranker(tmp_path, name))), KEPT[name]["scores"]
    asked = [(*pair, None) for pair in PAIRS] + [(*PAIRS[0], INSTRUCTION)] * (len(wanted) - len(PAIRS))
    for (query, document, told), expected in zip(asked, wanted, strict=True):
        tokens, _ = pair_tokens(checkpoint.tokenizer, checkpoint.task, query, document, told, vocab=320)
        (rows,) = Reference(checkpoint).logits([np.array(tokens)])
        assert activated(checkpoint.task, float(rows[-1, 0])) == pytest.approx(expected, abs=1e-5)


def published(folder: Path) -> Checkpoint:
    """A model of text as the files of transformers' `save_pretrained`, opened as a reranker."""
    write_published_reranker(folder)
    (folder / "config.json").write_text(json.dumps(KEPT[PUBLISHED]["files"]["config.json"]))
    return Checkpoint.open(str(folder), ranks=True)


def test_a_published_reranker_scores_as_its_model_card_says(tmp_path):
    checkpoint, wanted = published(tmp_path), KEPT[PUBLISHED]["scores"]
    asked = [*((*pair, None) for pair in PAIRS), (*PAIRS[0], INSTRUCTION)]
    for (query, document, told), expected in zip(asked, wanted, strict=True):
        tokens, _ = pair_tokens(checkpoint.tokenizer, checkpoint.task, query, document, told, vocab=320)
        (rows,) = Reference(checkpoint).logits([np.array(tokens)])
        assert activated(checkpoint.task, float(rows[-1, 0])) == pytest.approx(expected, abs=1e-5)


def test_a_published_reranker_is_exported_as_asked(tmp_path):
    published(tmp_path / "checkpoint")
    options = ["--context", "512", "--ar", "1,32", "--calibration-tokens", "512", "--no-quality-check", "-q"]
    assert run(["export", str(tmp_path / "checkpoint"), "-o", str(tmp_path / "b"), "--task", "rerank", *options]) == 0
    with edgekv.load(tmp_path / "b") as model:
        for (query, document), expected in zip(PAIRS, KEPT[PUBLISHED]["scores"], strict=False):
            (found,) = model.rerank(query, [document])
            assert found.score == pytest.approx(expected, abs=0.02)


def test_what_is_no_published_reranker_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"--task rerank: got modules.json.*Leave --task out"):
        Checkpoint.open(str(write_reranker(tmp_path / "new", "qwen3-reranker")), ranks=True)
    plain = write_checkpoint(tmp_path / "plain", ARCHITECTURES["qwen3"])
    with pytest.raises(CheckpointError, match=r"--task rerank: got a tokenizer without yes, no, <\|im_start\|>"):
        Checkpoint.open(str(plain), ranks=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_of_8_bits_keeps_the_scores(tmp_path, name):
    with edgekv.load(bundle_of(tmp_path, name)) as model:
        for (query, document), expected in zip(PAIRS, KEPT[name]["scores"], strict=False):
            (found,) = model.rerank(query, [document])
            assert found.score == pytest.approx(expected, abs=0.02)


@pytest.mark.htp
@pytest.mark.parametrize("name", ["qwen3-reranker", "classifier"])
def test_graphs_of_rerankers_compute_in_integers_alone(tmp_path, name):
    bundle = bundle_of(tmp_path, name, "w4a16", check_on_htp=True)
    assert open_bundle(bundle).manifest.htp_check == "integers-only"


@pytest.mark.slow
def test_an_export_measures_the_scores(tmp_path):
    checkpoint = Checkpoint.open(str(write_reranker(tmp_path / "checkpoint", "qwen3-reranker")))
    options = small_options(context=128, ar=(1, 8), check_quality=True)
    found = export_bundle(checkpoint, tmp_path / "bundle", options).task_quality
    assert found.pairs == 64 and 0 < found.difference < found.max_difference < 0.05


def test_scores_in_another_order_are_a_loss():
    exact = np.array([[0.1, 0.9], [0.8, 0.2]])
    same, other = compared_scores(exact, exact), compared_scores(exact, 1 - exact)
    assert (same.difference, same.same_first) == (0, 1)
    assert (other.max_difference, other.same_first) == (pytest.approx(0.8), 0)
    assert compared_scores(exact, np.full((2, 2), np.nan)).difference == 1


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("qwen3-reranker", {"1_LogitScore": {"true_token_id": None}}, "true_token_id: got None; expected a token id"),
        ("qwen3-reranker", {"1_LogitScore": {"false_token_id": 320}}, "got the token 320; expected ids below 320"),
        ("classifier", {"config.json": {"id2label": {"0": "a", "1": "b"}}}, "id2label: got 2 labels; expected one"),
        ("qwen3-reranker", {"sentence_transformers": {"activation_fn": "torch.nn.ReLU"}}, "activation_fn: got ReLU"),
    ],
)
def test_what_gives_no_score_is_refused_by_name(tmp_path, name, changes, said):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(str(write_reranker(tmp_path, name, **changes)))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_without_places_for_both_is_refused(tmp_path, template):
    folder = write_reranker(tmp_path, "qwen3-reranker")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match="chat template: got one that leaves them out, changes them or swaps"):
        Checkpoint.open(str(folder))


# ---------------------------------------------------------------------- Model.rerank


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with edgekv.load(bundle_of(tmp_path_factory.mktemp("reranker"))) as found:
        yield found


def test_documents_come_best_first(model):
    found = model.rerank("one", DOCUMENTS)
    assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)
    assert sorted(each.index for each in found) == [0, 1, 2, 3]
    alone = {number: model.rerank("one", [text])[0].score for number, text in enumerate(DOCUMENTS)}
    assert all(each.score == alone[each.index] for each in found)
    assert model.rerank("one", DOCUMENTS, top_n=2) == found[:2]


def test_the_query_is_run_once(model):
    query = "a long query that all of the documents share"
    model.rerank(query, ["a"])
    before = model.engine.graphs.times.steps
    model.rerank(query, ["b", "c", "d"])
    assert model.engine.graphs.times.steps - before <= 3 * 2


def test_an_instruction_changes_the_scores(model):
    assert model.rerank("one", ["a"], instruction=INSTRUCTION) != model.rerank("one", ["a"])


def test_a_document_that_is_cut_keeps_what_is_behind_it(model):
    long = "abcdefgh" * 20
    with pytest.warns(EdgeKVWarning, match=r"documents\[0\]: its end was left out, \d+ tokens or more$"):
        (cut,) = model.rerank("q", [long], truncate=True)
    around = 128 - len(model.encode_chat("".join(model.bundle.manifest.task.pieces))) - 1
    assert model.rerank("q", [long[:around]]) == [cut]
    with pytest.raises(ContextFullError, match=r"documents\[1\]: got \d+ tokens, with the query; expected at most 128"):
        model.rerank("q", ["a", long])


def test_joined_texts_are_cut_too(tmp_path):
    with edgekv.load(bundle_of(tmp_path, "pairs")) as model:
        with pytest.warns(EdgeKVWarning, match="77 tokens or more$"):
            assert model.rerank("query", ["x" * 200], truncate=True) == model.rerank("query", ["x" * 123])
        with pytest.raises(UsageError, match="instruction: got one; expected none"):
            model.rerank("query", ["a"], instruction="told")


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("", ["a"]), {}, "query: got an empty text"),
        (("q", ["a", ""]), {}, r"documents\[1\]: got an empty text"),
        (("q", "abc"), {}, "documents: got a text; expected a list"),
        (("q", ["a"]), {"top_n": 0}, "top_n: got 0; expected at least 1"),
    ],
)
def test_bad_input_is_named(model, arguments, options, said):
    with pytest.raises(UsageError, match=said):
        model.rerank(*arguments, **options)


def test_bundles_of_another_kind_are_named(model, tmp_path):
    with pytest.raises(UsageError, match="got a reranker's bundle; expected an embedder's bundle"):
        model.embed(["a"])
    with pytest.raises(UsageError, match="got a reranker's bundle, which writes no text"):
        model.generate("a")
    embedder = exported(write_embedder(tmp_path, "qwen3-embedding"), export_options(context=64, ar=(1, 8)))
    said = "got an embedder's bundle; expected a reranker's bundle"
    with edgekv.load(embedder) as other, pytest.raises(UsageError, match=said):
        other.rerank("q", ["a"])


# ---------------------------------------------------------------------- edgekv rerank, /v1/rerank


def test_the_command_prints_documents_best_first(model, tmp_path, capsys):
    bundle, wanted = str(model.bundle.path), model.rerank("one", DOCUMENTS)
    (tmp_path / "documents.txt").write_text("\n".join(DOCUMENTS))
    assert run(["rerank", bundle, "--query", "one", "--file", str(tmp_path / "documents.txt")]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [(int(at), text) for _, at, text in lines] == [(each.index, DOCUMENTS[each.index]) for each in wanted]
    assert run(["rerank", bundle, "--query", "one", "--text", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"][0]["text"] == "a"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(bundle_of(tmp_path_factory.mktemp("served"))) as found:
        yield found


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_the_server_gives_what_the_library_gives(server, model, path):
    asked = {"model": NAME, "query": "one", "documents": [*DOCUMENTS[:3], {"text": DOCUMENTS[3]}]}
    status, answer = server.post(path, asked | {"top_n": 3, "return_documents": True})
    wanted = model.rerank("one", DOCUMENTS, top_n=3)
    assert status == 200
    assert [(each["index"], each["relevance_score"]) for each in answer["results"]] == [
        (each.index, each.score) for each in wanted
    ]
    assert answer["results"][0]["document"] == {"text": DOCUMENTS[wanted[0].index]}
    assert answer["usage"]["total_tokens"] > 0 and answer["model"] == NAME


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"documents": []}, "documents: got 0 documents"),
        ({"documents": ["a", ""]}, "documents[1]: got an empty text"),
        ({"query": ""}, "query: got an empty text"),
        ({"top_n": 0}, "top_n: got 0"),
        ({"documents": ["x" * 200]}, "documents[0]: got"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens: got -2; expected -1"),
        ({"truncate_prompt_tokens": 9}, "with the query; expected at least one token of it in 9, which it is cut to"),
    ],
)
def test_requests_that_cannot_be_answered_name_the_field(server, fields, said):
    status, answer = server.post("/v1/rerank", {"model": NAME, "query": "one", "documents": ["a"]} | fields)
    assert status == 400 and said in answer["error"]["message"]


def test_a_client_says_how_long_documents_may_be(server, model):
    document = "abcdefgh" * 3
    (whole,) = server.post("/v1/rerank", {"model": NAME, "query": "one", "documents": [document]})[1:]
    asked = {"model": NAME, "query": "one", "documents": [document], "truncate_prompt_tokens": -1}
    assert server.post("/v1/rerank", asked)[1]["results"] == whole["results"]
    tokens = whole["usage"]["total_tokens"] - 20
    status, cut = server.post("/v1/rerank", asked | {"truncate_prompt_tokens": tokens})
    assert status == 200 and cut["usage"]["total_tokens"] == tokens
    assert cut["results"][0]["relevance_score"] == model.rerank("one", [document[:4]])[0].score


def test_a_model_of_text_ranks_nothing():
    with served(exported_architecture("qwen3")) as server:
        status, answer = server.post("/v1/rerank", {"model": NAME, "query": "one", "documents": ["a"]})
    assert status == 400 and f"{NAME} generates text and ranks nothing" in answer["error"]["message"]


def test_a_reranker_embeds_nothing(server):
    status, answer = server.post("/v1/embeddings", {"model": NAME, "input": "a"})
    assert status == 400 and "got a reranker's bundle; expected an embedder's bundle" in answer["error"]["message"]
