from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from edgekv.errors import UsageError
from edgekv.session import Detokenizer, StopSequences

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT), max_size=40)


@pytest.fixture(scope="module")
def tokenizer(embedded: Path) -> Tokenizer:
    """Byte-level: a character outside of ASCII takes several tokens."""
    return Tokenizer.from_file(str(embedded / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: unknown characters as bytes, and the first word without its space."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "\u2581import": 257, "\u2581os": 258}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def _stream(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [detokenizer.push(token) for token in tokens] + [detokenizer.flush()]


@given(text=TEXTS)
@example(text="naïve — 漢字 \U0001f469‍\U0001f4bb")
def test_pieces_make_up_the_text_and_are_whole(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = _stream(Detokenizer(tokenizer), tokens)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.lists(st.integers(0, 4095), max_size=30))
def test_any_tokens_give_the_text_of_all_of_them(tokenizer: Tokenizer, tokens: list[int]) -> None:
    assert "".join(_stream(Detokenizer(tokenizer), tokens)) == tokenizer.decode(tokens)


def test_an_incomplete_character_is_held_until_the_end(tokenizer: Tokenizer) -> None:
    first, *_ = tokenizer.encode("漢", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(first) == ""
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


@given(TEXTS.filter(bool), TEXTS, st.integers(0, 8))
def test_a_prompt_may_end_within_a_character(tokenizer: Tokenizer, prompt: str, text: str, cut: int) -> None:
    tokens = tokenizer.encode(prompt + "漢" + text, add_special_tokens=False).ids
    cut = max(0, len(tokens) - cut)
    pieces = _stream(Detokenizer(tokenizer, tokens[:cut]), tokens[cut:])
    whole = tokenizer.decode(tokens[:cut]).rstrip(REPLACEMENT)
    assert whole + "".join(pieces) == prompt + "漢" + text


def test_the_space_between_prompt_and_answer_is_kept(byte_fallback: Tokenizer) -> None:
    assert _stream(Detokenizer(byte_fallback), [257, 258]) == ["import", " os", ""]
    assert _stream(Detokenizer(byte_fallback, [257]), [258]) == [" os", ""]


def test_a_character_of_byte_tokens_comes_whole(byte_fallback: Tokenizer) -> None:
    euro = [byte + 1 for byte in "€".encode()]
    assert _stream(Detokenizer(byte_fallback, [257]), [*euro, *euro, 258]) == ["", "", "€", "", "", "€", " os", ""]


def _until_stop(text: str, sequences: list[str]) -> str:
    """Naive: read on, letter by letter, until the text read so far ends in a sequence."""
    for end in range(1, len(text) + 1):
        if whole := [s for s in sequences if text[:end].endswith(s)]:
            return text[: end - len(max(whole, key=len))]
    return text


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
@example(["abcd", "bc"], ["ab", "cd"])
def test_text_ends_before_the_first_stop_sequence(sequences: list[str], pieces: list[str]) -> None:
    stops = StopSequences(sequences)
    printed = "".join(stops.push(piece) for piece in pieces) + stops.flush()
    assert printed == _until_stop("".join(pieces), sequences)
    assert stops.found == (printed != "".join(pieces))


def test_what_may_begin_a_stop_sequence_is_held_back() -> None:
    stops = StopSequences(["\n\n"])
    assert [stops.push(piece) for piece in ("a\n", "b", "\n", "\nc", "d")] == ["a", "\nb", "", "", ""]
    assert stops.found


def test_an_empty_stop_sequence_is_refused() -> None:
    with pytest.raises(UsageError, match="stop: got an empty text"):
        StopSequences([""])
