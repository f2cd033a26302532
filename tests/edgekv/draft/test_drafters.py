"""Drafters: prompt lookup and corpora, held against searching by hand."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgekv.draft import CorpusDrafter, CorpusIndex, PromptLookup, SuffixAutomaton, build_index, open_corpus
from edgekv.errors import UsageError
from edgekv.spec.text import open_tokenizer

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def longest_suffix(tokens: list[int]) -> int:
    """Length of the longest end of a text that also occurs before."""
    lengths = range(len(tokens) - 1, 0, -1)
    return next((n for n in lengths if any(tokens[at : at + n] == tokens[-n:] for at in range(len(tokens) - n))), 0)


@given(TEXTS)
def test_the_automaton_finds_the_longest_suffix_that_occurred_before(tokens: list[int]):
    automaton = SuffixAutomaton()
    for at, token in enumerate(tokens, start=1):
        automaton.append(token)
        length, end = automaton.match
        assert length == longest_suffix(tokens[:at])
        assert end < at and tokens[end - length : end] == tokens[at - length : at]


def test_the_automaton_knows_a_late_occurrence():
    automaton = SuffixAutomaton()
    for token in [1, 2, 3, 1, 2, 4, 1, 2]:
        automaton.append(token)
    assert automaton.match == (2, 5)  # followed by 4, not by 3


def test_the_automaton_needs_few_states_for_long_texts():
    automaton = SuffixAutomaton()
    for token in np.random.default_rng(0).integers(0, 50, 5000).tolist():
        automaton.append(token)
    assert len(automaton) == 5000 and len(automaton._link) <= 2 * 5000


def test_prompt_lookup_copies_what_followed():
    drafter = PromptLookup()
    text = [9, 1, 2, 3, 4, 5, 6, 7, 1, 2]
    assert drafter.propose(text, 3) == [3, 4, 5]
    assert drafter.support == 2
    assert drafter.propose([*text, 3, 4], 2) == [5, 6]
    assert PromptLookup().propose([1, 2, 3], 2) == ()


def test_prompt_lookup_resumes_behind_a_replaced_token():
    drafter = PromptLookup()
    text = [9, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    assert drafter.propose([*text, 8], 2) == [5, 6] and drafter.support == 1  # 8 replaces 4
    assert drafter.propose([*text, 8, 10], 2) == () and drafter.support == 0
    assert PromptLookup().propose([9, 1, 2, 9, 8], 2) == ()  # one token alone says little


def test_prompt_lookup_continues_a_repetition():
    assert PromptLookup().propose([7, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


@given(TEXTS.filter(bool), TEXTS)
def test_a_corpus_has_the_longest_context_and_what_followed_it(corpus: list[int], context: list[int]):
    index = CorpusIndex(build_index(np.array(corpus, np.uint32)), len(corpus))
    length, places = index.places(context, 100)
    found = {
        n: [at + n for at in range(len(corpus) - n + 1) if corpus[at : at + n] == context[-n:]] for n in range(1, 33)
    }
    wanted = max((n for n, ends in found.items() if ends and n <= len(context)), default=0)
    assert length == wanted
    if wanted:
        # A place is counted from the end, so that it is the number of tokens that follow.
        assert sorted(len(corpus) - place for place in places) == found[wanted]
        for place in places:
            at = len(corpus) - place
            assert list(index.after(place, 5)) == corpus[at : at + 5]


def test_a_corpus_proposes_the_max_frequent_continuation():
    corpus = [5, 1, 2, 8, 6, 1, 2, 9, 7, 1, 2, 9]
    drafter = CorpusDrafter(CorpusIndex(build_index(np.array(corpus, np.uint32)), len(corpus)))
    assert drafter.propose([0, 1, 2], 1) == (9,)
    assert drafter.support == 2
    assert drafter.propose([0], 4) == () and drafter.support == 0


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "corpora"


def test_a_corpus_is_indexed_once_and_mapped(embedded: Path, tmp_path: Path, caches: Path):
    tokenizer = open_tokenizer(embedded / "tokenizer.json")
    text = tmp_path / "corpus.py"
    text.write_text("import os\n\n\ndef main():\n    print(os.getcwd())\n" * 20)
    drafter = CorpusDrafter(open_corpus(text, tokenizer, 4096))
    tokens = tokenizer.encode("def main():\n    print(os.getcwd", add_special_tokens=False).ids
    assert tokenizer.decode(list(drafter.propose(tokens, 2))).startswith("())")
    (kept,) = caches.iterdir()
    made = kept.stat()
    assert made.st_mode & 0o077 == 0 or os.name == "nt"
    again = open_corpus(text, tokenizer, 4096)
    assert CorpusDrafter(again).propose(tokens, 2) == drafter.propose(tokens, 2)
    assert [each.stat().st_ino for each in caches.iterdir()] == [made.st_ino]
    text.write_text("import sys\n")
    open_corpus(text, tokenizer, 4096)
    assert len(list(caches.iterdir())) == 2


def test_a_damaged_index_is_made_again(embedded: Path, tmp_path: Path, caches: Path):
    tokenizer = open_tokenizer(embedded / "tokenizer.json")
    text = tmp_path / "corpus.txt"
    text.write_text("one two three one two three")
    whole = CorpusDrafter(open_corpus(text, tokenizer, 4096))
    (kept,) = caches.iterdir()
    content = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(b"\xff" * 9 + content[9:])
    tokens = tokenizer.encode("one two", add_special_tokens=False).ids
    assert CorpusDrafter(open_corpus(text, tokenizer, 4096)).propose(tokens, 3) == whole.propose(tokens, 3)
    assert kept.read_bytes() == content


def test_a_corpus_works_without_a_cache_folder(embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "file"))
    text = tmp_path / "corpus.txt"
    text.write_text("one two three one two three")
    tokenizer = open_tokenizer(embedded / "tokenizer.json")
    assert len(open_corpus(text, tokenizer, 4096)) > 3


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"\x7fELF\x80\xff", "utf-8"),
        (b"a\0b", "a binary file"),
        (b"", "no text"),
        (b" \n", "no text"),
        (None, "No such"),
    ],
)
def test_a_corpus_that_is_no_text_is_refused(embedded: Path, tmp_path: Path, caches: Path, content: bytes, found: str):
    path = tmp_path / "corpus"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=found) as error:
        open_corpus(path, open_tokenizer(embedded / "tokenizer.json"), 4096)
    assert error.value.field == "draft corpus" and str(path) in str(error.value)
    assert not caches.exists()


def test_a_corpus_that_is_too_large_is_refused_before_it_is_read(embedded: Path, tmp_path: Path):
    path = tmp_path / "corpus"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(UsageError, match=r"67\.1 MB, more than the limit"):
        open_corpus(path, open_tokenizer(embedded / "tokenizer.json"), 4096)
    with pytest.raises(UsageError, match="a folder"):
        open_corpus(tmp_path, open_tokenizer(embedded / "tokenizer.json"), 4096)
