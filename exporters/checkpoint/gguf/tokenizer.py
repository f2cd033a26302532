"""The tokenizer that a GGUF file describes, rebuilt for the `tokenizers` package."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from edgekv.spec.chat import DEFAULT, ChatTemplates
from exporters.checkpoint.gguf.file import GgufFile

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # llama.cpp's token types
_UNKNOWN = 2
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LETTERS = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True, slots=True)
class _Splitter:
    """How text is split into words before byte-level BPE.

    Attributes:
        pattern: of words; None for GPT-2's own.
        single_digits: whether each digit is a word.
        whole_words: whether a word that is a token is used without merging.
        nfc: whether text is normalized to NFC first.
    """

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    nfc: bool = False


def _by_case(number: str, contractions: str = "", path: str = "") -> str:
    words = f"{_LETTERS}{_UPPER}*{_LOWER}+{contractions}|{_LETTERS}{_UPPER}+{_LOWER}*{contractions}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{path}]*|{_TAIL}"


_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_SPLITTERS = {
    "default": _Splitter(),
    "gpt-2": _Splitter(),
    "olmo": _Splitter(),
    "exaone4": _Splitter(),
    "smollm": _Splitter(single_digits=True),
    "starcoder": _Splitter(single_digits=True),
    "refact": _Splitter(single_digits=True),
    "granite": _Splitter(single_digits=True),
    "llama-bpe": _Splitter(_LLAMA3, whole_words=True),
    "llama3": _Splitter(_LLAMA3, whole_words=True),
    "smaug-bpe": _Splitter(_LLAMA3, whole_words=True),
    "dbrx": _Splitter(_LLAMA3),
    "qwen2": _Splitter(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Splitter(_QWEN2, nfc=True),
    "tekken": _Splitter(_by_case(r"\p{N}", path="/"), whole_words=True),
    "gpt-4o": _Splitter(_by_case(r"\p{N}{1,3}", rf"{_CONTRACTIONS}?", "/")),
}


def rebuild_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a GGUF file: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`, and `gemma4` with merges).

    Raises:
        CheckpointError: the kind of tokenizer or its pre-tokenizer is unknown, or a list is missing.
    """
    kind = file.text("tokenizer.ggml.model")
    tokens = file.list("tokenizer.ggml.tokens")
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise file.refusal("tokenizer.ggml.tokens", "a list of tokens", tokens[:1])
    if len(set(tokens)) != len(tokens):
        raise file.refusal("tokenizer.ggml.tokens", "each token once", f"{len(tokens) - len(set(tokens))} repeated")
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind in ("llama", "gemma4"):
        tokenizer = _sentence_piece(file, tokens, has_merges=kind == "gemma4")
    else:
        raise file.refusal("tokenizer.ggml.model", "gpt2, llama or gemma4", kind)
    _add_special(file, tokenizer, tokens)
    _add_bos(file, tokenizer, tokens, default=kind != "gpt2")
    return tokenizer


def chat_templates(file: GgufFile) -> ChatTemplates | None:
    """The chat templates of a GGUF file; None if it has none.

    Raises:
        CheckpointError: a template cannot be compiled.
    """
    key = "tokenizer.chat_template"
    names = [DEFAULT, *(str(name) for name in file.list("tokenizer.chat_templates"))]
    keys = {name: key if name == DEFAULT else f"{key}.{name}" for name in names}
    templates = {name: file.text(key) for name, key in keys.items() if key in file}
    if not templates:
        return None
    tokens = file.list("tokenizer.ggml.tokens")
    special = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")):
        if (entry := f"tokenizer.ggml.{key}_token_id") in file and 0 <= (number := file.size(entry)) < len(tokens):
            special[name] = str(tokens[number])
    found = ChatTemplates(templates=templates, tokens=special)
    found.check(file.path.name)
    return found


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    name = file.text("tokenizer.ggml.pre", "default")
    splitter = _SPLITTERS.get(name)
    if splitter is None:
        raise file.refusal("tokenizer.ggml.pre", ", ".join(_SPLITTERS), name)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _listed_merges(file, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitter.whole_words))
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitter.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitter.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitter.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitter.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _listed_merges(file: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = [_pair(file, merge) for merge in file.list("tokenizer.ggml.merges")]
    if missing := next((pair for pair in merges if not {*pair, "".join(pair)} <= vocabulary.keys()), None):
        raise file.refusal("tokenizer.ggml.merges", "pairs of known tokens", " ".join(missing))
    return merges


def _pair(file: GgufFile, merge: object) -> tuple[str, str]:
    parts = merge.split(" ") if isinstance(merge, str) else []
    if len(parts) != 2:
        raise file.refusal("tokenizer.ggml.merges", "pairs of tokens", merge)
    return parts[0], parts[1]


def _sentence_piece(file: GgufFile, tokens: list[str], *, has_merges: bool) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = tokens[_token_id(file, "tokenizer.ggml.unknown_token_id", tokens, 0)]
    merges = _listed_merges(file, vocabulary) if has_merges else _scored_merges(file, vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    leading_space = file.flag("tokenizer.ggml.add_space_prefix", not file.architecture.startswith("gemma"))
    prefix = [normalizers.Prepend(_SPACE)] if leading_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if leading_space else [])])
    return tokenizer


def _scored_merges(file: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Merges in the order in which SentencePiece applies them: the piece with the highest score first."""
    scores = file.list("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary):
        raise file.refusal("tokenizer.ggml.scores", f"{len(vocabulary)} numbers", f"{len(scores)} numbers")
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, number in vocabulary.items():
        for at in range(1, len(piece)):
            left, right = vocabulary.get(piece[:at]), vocabulary.get(piece[at:])
            if left is not None and right is not None:
                found.append((-scores[number], left, right, (piece[:at], piece[at:])))
    found.sort(key=lambda each: each[:3])
    return [pair for *_, pair in found]


def _add_special(file: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    kinds = file.list("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    own = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in own])


def _add_bos(file: GgufFile, tokenizer: Tokenizer, tokens: list[str], *, default: bool) -> None:
    """Start every text with BOS if the file says so; llama.cpp's default for SentencePiece is yes."""
    if not file.flag("tokenizer.ggml.add_bos_token", default) or "tokenizer.ggml.bos_token_id" not in file:
        return
    number = _token_id(file, "tokenizer.ggml.bos_token_id", tokens)
    bos = tokens[number]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 $B:0", special_tokens=[(bos, number)]
    )


def _token_id(file: GgufFile, key: str, tokens: list[str], default: int | None = None) -> int:
    """The id of a token."""
    number = file.size(key, default)
    if not 0 <= number < len(tokens):
        raise file.refusal(key, f"0 to {len(tokens) - 1}", number)
    return number
