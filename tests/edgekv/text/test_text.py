from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st
from tokenizers import Tokenizer, decoders, models

from edgekv.errors import BundleError, UsageError
from edgekv.spec.text import encode, open_tokenizer
from edgekv.text import Detokenizer, StopSequences, output
from edgekv.text.output import AnswerReaders, TextStream
from tests.support.checkpoints import write_tokenizer

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
    assert detokenizer.withholds
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == "" and not detokenizer.withholds


def test_a_text_that_is_cut_does_not_end_within_a_character(tokenizer: Tokenizer) -> None:
    euro = [_byte_token(tokenizer, byte) for byte in "a€".encode()]
    for length in (2, 3):
        detokenizer = Detokenizer(tokenizer)
        assert [detokenizer.push(token) for token in euro[:length]] == ["a", *[""] * (length - 1)]
        assert detokenizer.flush(cut=True) == "" and detokenizer.withholds
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push(token) for token in euro) + detokenizer.flush(cut=True) == "a€"


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
    assert stops.has_matched == (printed != "".join(pieces))


def test_what_may_begin_a_stop_sequence_is_held_back() -> None:
    stops = StopSequences(["\n\n"])
    assert [stops.push(piece) for piece in ("a\n", "b", "\n", "\nc", "d")] == ["a", "\nb", "", "", ""]
    assert stops.has_matched


@pytest.mark.parametrize(
    ("stop", "tokens", "text", "stopped"),
    [
        (["<|2|>"], [64, 258, 65], "a", True),
        (["a<|2|>"], [65, 64, 258, 65], "b", True),
        (["<|2|>b"], [64, 258, 65, 66], "a", True),
        (["<|2|><|3|>"], [64, 258, 258, 259, 65], "a", True),
        (["<|2|>x"], [64, 258, 65, 66], "abc", False),
        (["<|2|>"], [64, *b"\x1b[\x11[\x1d", 65], None, True),
        (["b"], [64, 258, 65], "a", True),
    ],
)
def test_a_stop_text_may_have_special_tokens(
    tmp_path: Path, stop: list[str], tokens: list[int], text: str | None, stopped: bool
) -> None:
    """They have no text in an answer; written as ordinary text they are found too."""
    write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = open_tokenizer(tmp_path / "tokenizer.json")
    if text is None:  # the bytes of <|2|>
        tokens, text = [64, *(tokenizer.token_to_id(each) for each in "<|2|>"), 65], "a"
    readers = AnswerReaders(special={number: f"<|{number - 256}|>" for number in range(256, 260)})
    stream = TextStream(tokenizer, (), stop, readers)
    found = ""
    for token in tokens:
        found += stream.push(token, is_text=True)[0]
        if stream.has_stopped:
            break
    assert (found + stream.flush(cut=False)[0], stream.has_stopped) == (text, stopped)


def test_an_empty_stop_sequence_is_refused() -> None:
    with pytest.raises(UsageError, match="stop: got an empty text"):
        StopSequences([""])


@given(st.lists(st.sampled_from([0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0xFF, 0x20, 0x41]), max_size=60))
@example(list("€".encode()[:2]) * 40)
@example([0xFF] * 50)
@example([0x80, 0xF0, 0x9F, 0x98, 0x80, 0xF0, 0x9F, 0x98] * 9)
def test_bytes_that_are_no_text_come_as_the_tokenizer_decodes_them(tokenizer: Tokenizer, raw: list[int]) -> None:
    tokens = [_byte_token(tokenizer, byte) for byte in raw]
    assert "".join(_stream(Detokenizer(tokenizer), tokens)) == tokenizer.decode(tokens)


def _byte_token(tokenizer: Tokenizer, byte: int) -> int:
    """The token of one byte; of byte-level tokenizers 188 bytes stand for themselves, the others follow U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [each for each in range(256) if each not in plain]
    token = tokenizer.token_to_id(chr(byte) if byte in plain else chr(0x100 + others.index(byte)))
    assert isinstance(token, int)
    return token


def test_invalid_bytes_are_held_back_for_three_bytes_only(tokenizer: Tokenizer, byte_fallback: Tokenizer) -> None:
    """Otherwise a stop text behind them would never be seen."""
    byte_level = [_byte_token(tokenizer, 0x80)] * 10
    for each, tokens in ((tokenizer, byte_level), (byte_fallback, [0x80 + 1] * 10)):
        pieces = _stream(Detokenizer(each), tokens)
        assert pieces == [""] * 3 + [REPLACEMENT] * 7 + [REPLACEMENT * 3]


def test_a_long_run_of_invalid_bytes_is_decoded_a_few_tokens_at_a_time(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, plain = list[int](), output.decode

    def counted(tokenizer: Tokenizer, tokens: list[int], *, skip_special_tokens: bool) -> str:
        decoded.append(len(tokens))
        return plain(tokenizer, tokens, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(output, "decode", counted)
    detokenizer = Detokenizer(tokenizer)
    for _ in range(300):
        detokenizer.push(_byte_token(tokenizer, 0x80))
    assert max(decoded) < 32


def _rewritten(embedded: Path, folder: Path, **changes: object) -> Path:
    """The embedded tokenizer with some entries replaced."""
    content = json.loads((embedded / "tokenizer.json").read_text("utf-8")) | changes
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    return folder / "tokenizer.json"


def test_truncation_and_padding_of_a_tokenizer_are_not_applied(embedded: Path, tmp_path: Path) -> None:
    truncation = {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 2, "pad_type_id": 0, "pad_token": "<|pad|>"}
    path = _rewritten(embedded, tmp_path, truncation=truncation, padding=padding)
    text = "def read(path):\n    return path.read_text()\n"
    assert encode(open_tokenizer(path), text) == encode(open_tokenizer(embedded / "tokenizer.json"), text)


def _twice() -> dict[str, object]:
    part = {"Sequence": {"id": "A", "type_id": 0}}
    return {"type": "TemplateProcessing", "single": [part, part], "pair": [part, part], "special_tokens": {}}


def _replace(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    ("stage", "rules", "work"),
    [
        ("normalizers", [_replace({"String": "a"}, "a" * 1000)] * 3, "encoding: got 4,000,000,000 times"),
        ("normalizers", [_replace({"String": "a"}, "aa")] * 30, "encoding: got 4,294,967,296 times"),
        ("normalizers", [_replace({"Regex": "(?=a)"}, "a")] * 30, "encoding: got 4,294,967,296 times"),
        (
            "normalizers",
            [_replace({"String": "\u0627"}, "\ufdfa"), {"type": "NFKC"}] * 4,
            "encoding: got 419,904 times",
        ),
        ("normalizers", [{"type": "ByteLevel"}] * 20, "encoding: got "),
        ("normalizers", [{"type": "Prepend", "prepend": "a" * 5000}], "times the text and 20,001 more"),
        ("decoders", [_replace({"String": "a"}, "aa")] * 30, "decoding: got 1,073,741,824 times"),
        ("decoders", [{"type": "BPEDecoder", "suffix": ""}] * 30, "decoding: got 1,073,741,824 times"),
        ("processors", [_twice()] * 30, "encoding: got 4,294,967,296 times"),
    ],
)
def test_a_tokenizer_that_multiplies_text_is_refused(embedded: Path, tmp_path: Path, stage: str, rules, work) -> None:
    """Before it is opened: an added token is normalized then."""
    name = {"normalizers": "normalizer", "decoders": "decoder", "processors": "post_processor"}[stage]
    content = {"type": "Sequence", stage: rules}
    token = {"id": 0, "content": "a" * 100, "special": False, "normalized": True}
    token |= {"single_word": False, "lstrip": False, "rstrip": False}
    path = _rewritten(embedded, tmp_path, **{name: content, "added_tokens": [token]})
    with pytest.raises(UsageError, match=work):
        open_tokenizer(path)


@pytest.mark.parametrize(
    "rules",
    [
        [{"type": "Prepend", "prepend": "\u2581"}, _replace({"String": " "}, "\u2581")],
        [{"type": "NFC"}, _replace({"Regex": "\\s+"}, " "), {"type": "Lowercase"}],
        [{"type": "NFKC"}, {"type": "NFC"}, {"type": "Lowercase"}, _replace({"Regex": " {2,}"}, "\u2581")],
    ],
)
def test_normalizers_of_known_models_are_accepted(embedded: Path, tmp_path: Path, rules) -> None:
    assert open_tokenizer(_rewritten(embedded, tmp_path, normalizer={"type": "Sequence", "normalizers": rules}))


def test_no_other_file_opens_a_tokenizer() -> None:
    """What `open_tokenizer` takes care of must hold for prompts, calibration and exports alike.

    `growth` opens one without its vocabulary.
    """
    root = Path(__file__).parents[3]
    sources = [path for room in ("edgekv", "exporters", "quant") for path in (root / room).rglob("*.py")]
    found = [path.relative_to(root).as_posix() for path in sources if "Tokenizer.from_" in path.read_text("utf-8")]
    assert sorted(found) == ["edgekv/spec/growth.py", "edgekv/spec/text.py"]


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    ],
    ids=["at its opening", "at its first text"],
)
def test_a_tokenizer_that_panics_is_refused(embedded: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    """The library's panics derive from BaseException alone."""
    path = _rewritten(embedded, tmp_path, **changes)
    with pytest.raises(UsageError, match=r"tokenizer.json: got a panic in the tokenizers library: .* expected a token"):
        encode(open_tokenizer(path), "some text")


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"tokenizer.json: got no such file"):
        open_tokenizer(tmp_path / "tokenizer.json", BundleError)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer.json: got .*; expected a tokenizer.json that"):
        open_tokenizer(tmp_path / "tokenizer.json", BundleError)
