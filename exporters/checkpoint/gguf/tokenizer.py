"""The tokenizer that a GGUF file describes, rebuilt for the `tokenizers` package."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

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

from edgekv.errors import CheckpointError, EdgeKVWarning
from edgekv.spec.chat import DEFAULT, ChatTemplates
from exporters.checkpoint.gguf.file import GgufFile
from exporters.checkpoint.gguf.special import CONTROL, SpecialIds, special_ids

_UNKNOWN, _USER_DEFINED = 2, 4  # llama.cpp's token types, of which the last is 6
_KINDS = range(7)
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_MAX_CHARACTERS = 1 << 24  # of all tokens: four times the largest vocabularies
_ADD = "tokenizer.ggml.add_"
_KEPT_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # special tokens of Phi-3 that do not swallow the space after them

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LETTERS = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True, slots=True)
class _Splitter:
    """How text is split into words before byte-level BPE.

    Attributes:
        patterns: each splits what the ones before have left; none for GPT-2's own.
        single_digits: whether each digit is a word.
        whole_words: whether a word that is a token is used without merging.
        nfc: whether text is normalized to NFC first.
        begins: whether texts begin with BOS where the file does not say it.
    """

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    begins: bool = False


def _by_case(number: str, contractions: str = "", path: str = "") -> str:
    words = f"{_LETTERS}{_UPPER}*{_LOWER}+{contractions}|{_LETTERS}{_UPPER}+{_LOWER}*{contractions}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{path}]*|{_TAIL}"


_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_MARKS = r"[\p{P}\$\+<=>\^~\|`]+"
_THREE = r"[0-9][0-9][0-9]"
_ENGLISH = rf"{_CONTRACTIONS}|{_LETTERS}\p{{L}}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_GPT2 = _Splitter()
_DIGITS = _Splitter(single_digits=True)
_LLAMA3 = _Splitter((rf"{_ENGLISH}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_TAIL}",), whole_words=True, begins=True)
_QWEN2 = _Splitter((rf"{_ENGLISH}|\p{{N}}|{_PUNCTUATION}|{_TAIL}",), nfc=True)
_QWEN35 = _Splitter(
    (rf"{_CONTRACTIONS}|{_LETTERS}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}",), nfc=True
)
_GPT4O = _Splitter((_by_case(r"\p{N}{1,3}", rf"{_CONTRACTIONS}?", "/"),))
_HAN = "[\N{CJK UNIFIED IDEOGRAPH-4E00}-\N{CJK UNIFIED IDEOGRAPH-9FA5}\u0800-\u4e00\uac00-\ud7ff]+"
_CHINESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_SYMBOLS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)
_SPACES = r"\s*[\r\n]+|" + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_SPACES += r"|\s{1,2}(?!\S)|\s{1}"
_SPLITTERS = {
    "default": _Splitter((r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", _THREE)),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "gigachat", "a.x-4.0", "mellum"), _GPT2),
    **dict.fromkeys(("exaone4", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "granite", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    "smaug-bpe": replace(_LLAMA3, begins=False),
    "dbrx": replace(_LLAMA3, whole_words=False, begins=False),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN2),
    **dict.fromkeys(("hunyuan", "solar-open", "stablelm2"), replace(_QWEN2, nfc=False)),
    "chatglm-bpe": replace(_LLAMA3, whole_words=False, begins=False),
    "glm4": replace(_LLAMA3, begins=False),
    "hunyuan-dense": _Splitter((r"\p{N}{1,3}", _CHINESE, _SYMBOLS)),
    "jais-2": _Splitter((rf"{_ENGLISH}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}",)),
    "qwen35": _QWEN35,
    "tekken": _Splitter((_by_case(r"\p{N}", path="/"),), whole_words=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie"), _GPT4O),
    "falcon": _Splitter((_MARKS, _WORDS, _THREE)),
    "deepseek-coder": _Splitter((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "seed-coder": _Splitter((rf"{_ENGLISH}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}",)),
}


def rebuild_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a GGUF file: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`, and `gemma4` with merges).

    Raises:
        CheckpointError: the kind of tokenizer or its pre-tokenizer is unknown, or a list is missing.
    """
    kind, tokens = file.text("tokenizer.ggml.model"), _tokens(file)
    special = special_ids(file)
    if kind == "gpt2":
        splitter = _splitter(file)
        tokenizer, begins = _byte_level(file, tokens, splitter), splitter.begins
    elif kind in ("llama", "gemma4"):
        tokenizer, begins = _sentence_piece(file, tokens, special, has_merges=kind == "gemma4"), True
    else:
        raise file.refusal("tokenizer.ggml.model", "gpt2, llama or gemma4", kind)
    _add_special(file, tokenizer, tokens, special)
    _add_bos(file, tokenizer, tokens, special, default=begins, always=kind == "gemma4")
    return tokenizer


def chat_templates(file: GgufFile) -> ChatTemplates | None:
    """The chat templates of a GGUF file; None if it has none.

    Raises:
        CheckpointError: a template cannot be compiled, or one that is listed is missing.
    """
    key = "tokenizer.chat_template"
    keys = {DEFAULT: key} if key in file else {}
    listed = file.texts("tokenizer.chat_templates")
    keys |= {name.removeprefix(f"{key}."): name for name in file.unread if name.startswith(f"{key}.")}
    if missing := [name for name in listed if name not in keys]:
        raise file.refusal("tokenizer.chat_templates", f"a field {key}.{missing[0]} for it", missing[0])
    templates = {name: file.text(key) for name, key in keys.items()}
    if not any(templates.values()):
        return None
    tokens, ids = file.texts("tokenizer.ggml.tokens"), special_ids(file)
    roles = {"bos_token": ids.bos, "eos_token": ids.eos, "pad_token": ids.pad, "unk_token": ids.unknown}
    special = {name: tokens[number] for name, number in roles.items() if number is not None}
    chat = ChatTemplates(templates=templates, tokens=special)
    chat.check(file.path.name)
    return chat


def _tokens(file: GgufFile) -> list[str]:
    """The text of each token; llama.cpp gives empty ones a name.

    Raises:
        CheckpointError: the list is none, or one stands there twice.
    """
    key = "tokenizer.ggml.tokens"
    tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(file.texts(key))]
    if not tokens:
        raise file.refusal(key, "a list of tokens", tokens)
    if len(set(tokens)) != len(tokens):
        raise file.refusal(key, "no token twice", len(tokens) - len(set(tokens)))
    if (characters := sum(map(len, tokens))) > _MAX_CHARACTERS:
        raise file.refusal(key, f"at most {_MAX_CHARACTERS} characters in all", characters)
    return tokens


def _splitter(file: GgufFile) -> _Splitter:
    key = "tokenizer.ggml.pre"
    name = file.text(key, "default")
    splitter = _SPLITTERS.get(name)
    if splitter is None:
        raise file.refusal(key, ", ".join(_SPLITTERS), name)
    if name == "default":
        what = repr(name) if key in file else "nothing"
        text = f"{file.path.name}: {key} is {what}: text may be split into other tokens than the model was trained on"
        warnings.warn(EdgeKVWarning(f"{text}. Convert the model again with a current llama.cpp."), stacklevel=2)
    return splitter


def _byte_level(file: GgufFile, tokens: list[str], splitter: _Splitter) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _listed_merges(file, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitter.whole_words))
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitter.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitter.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splitter.patterns))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _listed_merges(file: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = [_pair(file, merge) for merge in file.entries("tokenizer.ggml.merges")]
    if missing := next((pair for pair in merges if not {*pair, "".join(pair)} <= vocabulary.keys()), None):
        raise file.refusal("tokenizer.ggml.merges", "pairs of known tokens", " ".join(missing))
    return merges


def _pair(file: GgufFile, merge: object) -> tuple[str, str]:
    parts = merge.split(" ") if isinstance(merge, str) else []
    if len(parts) != 2:
        raise file.refusal("tokenizer.ggml.merges", "pairs of tokens", merge)
    return parts[0], parts[1]


def _sentence_piece(file: GgufFile, tokens: list[str], special: SpecialIds, *, has_merges: bool) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = tokens[special.unknown or 0]
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
    """Merges in the order in which SentencePiece applies them: the piece with the highest score first.

    Files whose converter had a `tokenizer.json` have one score for all pieces, whose ids are in the order of merges.
    """
    scores = _scores(file, len(vocabulary))
    lengths = sorted({len(piece) for piece in vocabulary})  # of all others no half is a piece
    merges: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for piece, number in vocabulary.items():
        for at in lengths:
            if at >= len(piece):
                break
            left, right = vocabulary.get(piece[:at]), vocabulary.get(piece[at:])
            if left is not None and right is not None:
                merges.append((-scores[number], number, left, right, (piece[:at], piece[at:])))
    merges.sort(key=lambda merge: merge[:4])
    return [pair for *_, pair in merges]


def _scores(file: GgufFile, count: int) -> list[float]:
    key = "tokenizer.ggml.scores"
    scores = file.entries(key)
    if len(scores) != count:
        raise file.refusal(key, f"{count} numbers, one for each token", len(scores))
    if wrong := [score for score in scores if type(score) not in (int, float) or not math.isfinite(score)]:
        raise file.refusal(key, "finite numbers", wrong[0])
    return scores


def _add_special(file: GgufFile, tokenizer: Tokenizer, tokens: list[str], special: SpecialIds) -> None:
    """Add the tokens that stand for themselves: control tokens and ends, and those that users defined."""
    key = "tokenizer.ggml.token_type"
    kinds = file.entries(key) or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise file.refusal(key, f"{len(tokens)} types, one for each token", len(kinds))
    if wrong := [code for code in kinds if type(code) is not int or code not in _KINDS]:
        raise file.refusal(key, f"llama.cpp's types, 0 to {_KINDS[-1]}", wrong[0])
    swallows = file.architecture == "phi3" and file.text("tokenizer.ggml.model") == "llama"
    added = []
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        is_special = kind in (CONTROL, _UNKNOWN) or number in special.ends
        if is_special or kind == _USER_DEFINED:
            strip = swallows and token not in _KEPT_SPACE
            added.append(AddedToken(token, special=is_special, normalized=False, rstrip=strip))
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])


def _add_bos(
    file: GgufFile, tokenizer: Tokenizer, tokens: list[str], special: SpecialIds, *, default: bool, always: bool
) -> None:
    """Start every text with BOS if the file says so, or by default; Gemma 4's files that say no are wrong."""
    if file.flag(f"{_ADD}eos_token"):
        fix = "Set it to false with gguf-set-metadata: a prompt that ends with EOS has no answer."
        raise CheckpointError(f"{file.path.name}: {_ADD}eos_token", got="true", expected="false", fix=fix)
    if not (file.flag(f"{_ADD}bos_token", default) or always):
        return
    if special.bos is None:
        raise file.refusal(
            "tokenizer.ggml.bos_token_id", "the token that texts begin with, as add_bos_token says", None
        )
    bos = tokens[special.bos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 $B:0", special_tokens=[(bos, special.bos)]
    )
