"""How much longer a tokenizer makes a text: a few rules that replace a letter by a thousand take gigabytes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from edgekv.machine.decoding import DECODERS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_FACTOR = 256
"""SentencePiece's rules with a replacement and Metaspace have 72, byte-level ones behind NFC 12."""
MAX_ADDED = 4096

_STAGES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_EMPTY_MODEL = msgspec.Raw(b'{"type":"BPE","vocab":{},"merges":[]}')
_UNICODE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "StripAccents": 1, "Strip": 1, "Nmt": 1}
"""Characters that one may become; several in a row give no more than the largest."""
_FACTORS = {
    "normalizer": {"BertNormalizer": 4, "ByteLevel": 4},
    "pre_tokenizer": {"ByteLevel": 4, "Metaspace": 2},
    "post_processor": {},
    "decoder": {"BPEDecoder": 2, "WordPiece": 2, "CTC": 2},
}


@dataclass(frozen=True, slots=True)
class Growth:
    """A text of n characters or tokens becomes one of `factor * n + added` at most."""

    factor: float
    added: float

    def then(self, factor: float, added: float) -> Growth:
        """That of this rule and one after it."""
        return Growth(self.factor * factor, self.added * factor + added)

    def __str__(self) -> str:
        return f"{self.factor:,.0f} times the text and {self.added:,.0f} more"

    @property
    def is_accepted(self) -> bool:
        return self.factor <= MAX_FACTOR and self.added <= MAX_ADDED


class _Piece(msgspec.Struct):
    sequence: dict[str, object] | None = msgspec.field(name="Sequence", default=None)


class _Special(msgspec.Struct):
    ids: list[int]


class _Rule(msgspec.Struct):
    type: str
    normalizers: list[_Rule] = []
    pretokenizers: list[_Rule] = []
    processors: list[_Rule] = []
    decoders: list[_Rule] = []
    pattern: dict[str, str] | str = ""
    content: str = ""
    prepend: str = ""
    precompiled_charsmap: str = ""
    single: list[_Piece] = []
    special_tokens: dict[str, _Special] = {}


def tokenizer_growth(raw: bytes) -> dict[str, Growth]:
    """The growth of texts that a `tokenizer.json` encodes, and of tokens that it decodes, by the name of the stage.

    The file is not opened as a whole: the library runs the normalizer on added tokens when it does.

    Raises:
        msgspec.DecodeError: not JSON.
        Exception: the library does not read the stages.
    """
    from tokenizers import Tokenizer

    content = DECODERS[dict[str, msgspec.Raw]].decode(raw)
    stages = {name: content[name] for name in _STAGES if name in content}
    opened = Tokenizer.from_str(msgspec.json.encode({"version": "1.0", **stages, "model": _EMPTY_MODEL}).decode())
    rules = {name: _rules(opened, name) for name in _STAGES}
    encoding = Growth(1, 0)
    for name in ("normalizer", "pre_tokenizer", "post_processor"):
        encoding = _after(encoding, name, rules[name])
    return {"encoding": encoding, "decoding": _after(Growth(1, 0), "decoder", rules["decoder"])}


def _rules(tokenizer: Tokenizer, stage: str) -> list[_Rule]:
    """The rules of a stage in order, as the library reads them."""
    opened = getattr(tokenizer, stage)
    return [] if opened is None else [*_flat(DECODERS[_Rule].decode(opened.__getstate__()))]


def _flat(rule: _Rule) -> Iterator[_Rule]:
    if rule.type != "Sequence":
        yield rule
    for inner in (*rule.normalizers, *rule.pretokenizers, *rule.processors, *rule.decoders):
        yield from _flat(inner)


def _after(growth: Growth, stage: str, rules: list[_Rule]) -> Growth:
    largest = 1  # of the Unicode normalizers just before
    for rule in rules:
        if stage == "normalizer" and rule.type in _UNICODE:
            largest = max(largest, _UNICODE[rule.type])
            continue
        growth, largest = growth.then(largest, 0).then(*_of_rule(stage, rule)), 1
    return growth.then(largest, 0)


def _of_rule(stage: str, rule: _Rule) -> tuple[float, float]:
    """The factor, and what is added."""
    match rule.type:
        case "Replace":
            text = rule.pattern.get("String", "") if isinstance(rule.pattern, dict) else rule.pattern
            if text:
                return max(1, len(rule.content) / len(text)), 0
            return len(rule.content) + 1, len(rule.content)  # a regular expression may match between all characters
        case "Prepend":
            return 1, len(rule.prepend)
        case "Precompiled":
            return _longest_replacement(rule.precompiled_charsmap), 0
        case "TemplateProcessing":
            texts = sum(piece.sequence is not None for piece in rule.single)
            special = max((len(token.ids) for token in rule.special_tokens.values()), default=0)
            return max(1, texts), (len(rule.single) - texts) * special
    return _FACTORS[stage].get(rule.type, 1), 0


def _longest_replacement(charsmap: str) -> int:
    """Of SentencePiece's rules: the size of a trie in 4 bytes, the trie, and the texts, each ended by a zero."""
    raw = base64.b64decode(charsmap)
    texts = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode("utf-8", "replace")) for text in texts))
