"""WikiText word perplexity: each step of its definition, and the whole against a formula for single tokens."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import edgekv
from edgekv.cli import run
from edgekv.errors import UsageError
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.inspect.wikitext import Window, count_words, detokenize, rolling_windows, split_pages
from exporters.quantize.reference import Reference
from tests.support.exports import export_options, exported

CONTEXT = 16
PAGES = [
    " = The Bill = \n Boulter 's guest @-@ starring role cost 1 @,@ 250 dollars . \n"
    " = = Career = = \n It was long . \n",
    " = Lists = \n A list is a sequence . \n",
    " = Short = \n An end . \n",
]
TEXT = " \n" + "".join(PAGES)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (" = Robert Boulter = \n", " = Robert Boulter =\n"),
        (" = = Career = = \n", " == Career ==\n"),
        ("a guest @-@ starring role", "a guest-starring role"),
        ("1 @,@ 250 @.@ 5 of them", "1,250.5 of them"),
        ('he said : " No " , twice ; why ?', 'he said: "No", twice; why ?'),
        ("Teddy 's ( and others ' ) story", "Teddy's (and others') story"),
        ("[ sic ] { x } at 5 ° C", "[sic] {x} at 5°C"),
        ("first . \n second \n", "first.\nsecond\n"),
    ],
)
def test_the_tokenization_of_wikitext_is_undone(page, text):
    assert detokenize(page) == text


def test_pages_begin_at_top_level_headings():
    pages = split_pages(TEXT)
    assert pages[:-1] == [page.removesuffix("\n") for page in PAGES[:-1]]
    assert "".join(f"{page}\n" for page in pages) == "".join(PAGES) + "\n"
    with pytest.raises(UsageError, match="= Title ="):
        split_pages("Some prose.\n = = Career = = \n")


def test_words_are_counted_in_the_original_with_an_empty_one_at_each_end():
    assert count_words(" = Short = \n An end . \n") == 8


@given(st.integers(1, 200), st.integers(2, 40), st.integers(0, 1))
def test_rolling_windows_predict_every_token_once_from_as_many_before_as_fit(tokens, length, sink):
    ids = list(range(1000, 1000 + tokens))
    windows = list(rolling_windows(ids, [7], length, [7] * sink))
    assert [token for window in windows for token in window.targets] == ids
    for window in windows:
        assert len(window.inputs) <= length
        text = [7, *ids]
        for row, target in enumerate(window.targets, window.first):
            begins = window.inputs[sink] if row >= sink and len(window.inputs) > sink else 7
            start = text.index(begins)
            seen = text[start : text.index(target)]
            assert list(window.inputs[sink if start else 0 : row + 1]) == seen
    if len(windows) > 1:
        assert len(windows[-1].inputs) == length


@given(st.integers(1, 20), st.integers(0, 19), st.integers(0, 19))
def test_a_window_without_its_first_tokens_predicts_the_rest(length, first, dropped):
    first, dropped = min(first, length - 1), min(dropped, length - 1)
    whole = Window(np.arange(length), np.arange(first + 1, length + 1), first)  # row i predicts i + 1
    rest = whole.after(dropped)
    assert rest.position == dropped
    assert list(rest.inputs) == list(range(dropped, length))
    assert [rest.inputs[row] + 1 for row in range(rest.first, len(rest.inputs))] == list(rest.targets)
    assert set(whole.targets) - set(rest.targets) == set(range(first + 1, dropped + 1))


@pytest.fixture(scope="module")
def bundle(embedded: Path) -> Path:
    return exported(embedded, export_options(context=CONTEXT, ar=(1, 8)))


def nll_of_each_token(score, ids: list[int], bos: int) -> list[float]:
    """Token i of n is predicted from the page so far; beyond the context L, from the rolling window that it is in."""
    found = []
    for i, token in enumerate(ids):
        block = i // CONTEXT
        end = min((block + 1) * CONTEXT, len(ids))
        seen = [bos, *ids[:i]] if block == 0 else ids[end - CONTEXT - 1 : i]
        logits = score(seen)[-1].astype(float)
        found.append(math.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[token])
    return found


@pytest.mark.slow
@pytest.mark.thorough
def test_word_perplexity_is_that_of_single_tokens(bundle, embedded, tmp_path, capsys):
    (tmp_path / "wiki.txt").write_text(TEXT)
    checkpoint = Checkpoint.open(str(embedded))
    model, reference = edgekv.load(bundle), Reference(checkpoint, CONTEXT)
    pages = split_pages(TEXT)[:2]
    ids = [checkpoint.encode(detokenize(page)) for page in pages]
    assert max(map(len, ids)) > CONTEXT
    words = sum(map(count_words, pages))
    limit = str(sum(map(len, ids)))
    call = ["eval", str(bundle), "--text", str(tmp_path / "wiki.txt"), "--word-perplexity", "--tokens", limit]
    assert run(call) == 0
    printed = capsys.readouterr().out
    assert run([*call, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == int(limit)
    assert (found["words"]["pages"], found["words"]["pages_in_text"], found["words"]["words"]) == (2, 3, words)
    for name, score, tolerance in (
        ("perplexity", model.score, 1e-4),  # the decode graph, which runs single tokens, may round to the next integer
        ("reference_perplexity", lambda seen: next(reference.logits([np.array(seen)])), 1e-6),
    ):
        nll = sum(sum(nll_of_each_token(score, page, 0)) for page in ids)
        assert found["words"][name] == pytest.approx(math.exp(nll / words), rel=tolerance)
        assert f"{found['words'][name]:.4f}" in printed
    assert f"{words} in 2 of 3 pages" in printed


def test_a_limit_below_the_first_page_is_refused(bundle, tmp_path, capsys):
    (tmp_path / "wiki.txt").write_text(TEXT)
    call = ["eval", str(bundle), "--text", str(tmp_path / "wiki.txt"), "--word-perplexity"]
    assert run([*call, "--tokens", "20"]) == 2
    assert "--tokens" in capsys.readouterr().err
    (tmp_path / "wiki.txt").write_text("No headings.")
    assert run(call) == 2
    assert "WikiText raw" in capsys.readouterr().err
