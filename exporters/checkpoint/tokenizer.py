"""The tokenizer and the chat templates of a Hugging Face folder: all files that transformers' `from_pretrained` opens.

`tests/golden/texts.py` changes each file and field, and compares with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from tokenizers import AddedToken, Tokenizer

from edgekv.errors import CheckpointError
from edgekv.machine.decoding import convert
from edgekv.spec.chat import DEFAULT, ChatTemplates
from edgekv.spec.text import TOKENIZER, open_tokenizer

CONFIG = "tokenizer_config.json"
TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
TEMPLATE = "chat_template.jinja"
FURTHER_TEMPLATES = "additional_chat_templates"
PROCESSOR_TEMPLATE = "chat_template.json"
PROCESSOR_CONFIGS = ("processor_config.json", "preprocessor_config.json")
FILES = (CONFIG, TOKENS_MAP, ADDED_TOKENS, TEMPLATE, f"{FURTHER_TEMPLATES}/*", PROCESSOR_TEMPLATE, *PROCESSOR_CONFIGS)
"""Files beside `tokenizer.json` that are read, as patterns."""

_STANDARD = dict.fromkeys(
    ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
).keys()
"""Names that all tokenizers have, in the order in which transformers adds their tokens."""
_FURTHER, _ADDITIONAL = "extra_special_tokens", "additional_special_tokens"
_SPECIFIC = "model_specific_special_tokens"
_PATCHED_VOCAB = 100_000
_PATCHED_SPLIT = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*"
"""Of transformers' correction of Mistral's pre-tokenizer, which it applies to larger vocabularies than that."""
_LARGEST_FILE_BYTES = 1 << 24
_FIX = "Fetch it again, together with the checkpoint, or let AutoTokenizer of transformers load and save the tokenizer."


_VERSION_LINE = "#version"  # of a text of merges, which readers skip


def short_json(tokenizer: str) -> bytes:
    """A `tokenizer.json` in fewer bytes: without white space, and with merges as texts instead of pairs.

    All versions of `tokenizers` read texts. Pairs that they cannot hold stay.
    """
    content = json.loads(tokenizer)
    merges = content["model"].get("merges")
    if merges and all(_is_text(merge) for merge in merges):
        content["model"]["merges"] = [" ".join(merge) for merge in merges]
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _is_text(merge: str | list[str]) -> bool:
    """Whether a merge is a pair that is the same as a text."""
    if isinstance(merge, str):
        return False
    return not any(" " in piece for piece in merge) and not merge[0].startswith(_VERSION_LINE)


class _Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An added token, as transformers writes it."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None
    special: bool = False
    type_: str = msgspec.field(default="AddedToken", name="__type")

    def added(self) -> AddedToken:
        normalized = not self.special if self.normalized is None else self.normalized
        flags = {"lstrip": self.lstrip, "rstrip": self.rstrip, "single_word": self.single_word}
        return AddedToken(self.content, **flags, normalized=normalized, special=self.special)


_Named = str | AddedToken
"""A token as a file names it: text alone, or with flags."""


@dataclass(frozen=True, slots=True)
class CheckpointTokenizer:
    """The tokenizer of a folder.

    Attributes:
        tokenizer: with the tokens that other files add.
        named: special tokens by their names, such as `eos_token`; templates use them as variables.
        file: `tokenizer.json`, if it alone describes the tokenizer.
    """

    tokenizer: Tokenizer
    named: Mapping[str, str]
    file: Path | None
    _folder: Path

    @classmethod
    def open(cls, folder: Path) -> CheckpointTokenizer:
        """Read `tokenizer.json` and the tokens of the files beside it.

        Raises:
            CheckpointError: a file or field is missing, broken or not supported.
        """
        path = folder / TOKENIZER
        tokenizer = open_tokenizer(path, CheckpointError, _FIX)
        before = tokenizer.get_added_tokens_decoder()
        config = _read_object(folder / CONFIG)
        _check_config(config, folder / CONFIG, tokenizer)
        special = _SpecialTokens(folder, config)
        special.add_to(tokenizer, before)
        is_changed = repr(tokenizer.get_added_tokens_decoder()) != repr(before)
        named = {name: str(token) for name, token in special.named.items()}
        return cls(tokenizer, named, None if is_changed else path, folder)

    def templates(self, *, reads_pictures: bool = False) -> ChatTemplates | None:
        """The chat templates: those of the tokenizer's files, or of the processor's; the other ones if it has none.

        Args:
            reads_pictures: whether they are the processor's first, with contents in parts.

        Raises:
            CheckpointError: a file is broken, or a template cannot be compiled.
        """
        folder, path = self._folder, self._folder / CONFIG

        def of_tokenizer() -> dict[str, str]:
            return _template_files(folder) or _configured(_read_object(path).get("chat_template"), path)

        def of_processor() -> dict[str, str]:
            return _processor_template(folder)

        first, second = (of_processor, of_tokenizer) if reads_pictures else (of_tokenizer, of_processor)
        if not (templates := first() or second()):
            return None
        chat = ChatTemplates(templates=templates, tokens=dict(self.named), reads_parts=reads_pictures)
        chat.check(str(folder))
        return chat


class _SpecialTokens:
    """The tokens that the files beside `tokenizer.json` name, in the order in which transformers adds them.

    `added_tokens_decoder` of tokenizer_config.json replaces special_tokens_map.json and added_tokens.json.

    Attributes:
        named: tokens by the names of their fields.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._where = folder / CONFIG
        self._by_id: dict[int, AddedToken] = {}
        self._is_legacy = config.get("added_tokens_decoder") is None
        fields = _read_fields(config, folder / CONFIG)
        if self._is_legacy:
            mapped = _read_map(fields, folder / TOKENS_MAP)
            fields |= mapped
            # transformers takes tokens with flags of tokenizer_config.json for special ones later
            special = {str(token) for token in _listed(mapped)}
            special |= {token for token in _listed(fields) if isinstance(token, str)}
            self._read_added(special, folder / ADDED_TOKENS)
        else:
            self._read_decoder(config["added_tokens_decoder"], folder / CONFIG)
        if _FURTHER not in fields:
            fields[_FURTHER] = fields.get(_ADDITIONAL, [])
        self._further: list[_Named] = fields[_FURTHER]
        standard = {name: fields[name] for name in _STANDARD if name in fields}
        others = {name: value for name, value in fields.items() if name.endswith("_token") and name not in _STANDARD}
        self.named: dict[str, _Named] = standard | others | fields.get(_SPECIFIC, {})

    def add_to(self, tokenizer: Tokenizer, known: Mapping[int, AddedToken]) -> None:
        """Add what the tokenizer does not have; where it has a token with other flags, these flags hold.

        Raises:
            CheckpointError: a token would get another id than the files say.
        """
        declared = dict(self._by_id)
        if self._is_legacy:
            self._by_id |= known
        by_content = {token.content: token for token in self._by_id.values()}
        for name in _STANDARD & self.named.keys():
            self.named[name] = by_content.get(str(self.named[name]), self.named[name])
        flags = {repr(token) for token in known.values()}
        added: list[_Named] = [token for _, token in sorted(self._by_id.items()) if repr(token) not in flags]
        contents = {str(token) for token in (*known.values(), *added)}
        for token in (*self.named.values(), *self._further):
            if str(token) not in contents and token not in added:  # of one content, the flags of the last one hold
                added.append(token)
        names = {str(token) for token in self.named.values()}
        tokenizer.add_tokens([_as_added(token, special=str(token) in names) for token in added])
        for number, token in sorted(declared.items()):
            stated_id = tokenizer.token_to_id(token.content)
            if stated_id != number:
                _refuse(f"{self._where}: {token.content}", f"id {number}", f"{stated_id}, its id in tokenizer.json")

    def _read_decoder(self, declared: object, path: Path) -> None:
        field = f"{path}: added_tokens_decoder"
        if not isinstance(declared, dict):
            _refuse(field, type(declared).__name__, "an object of tokens by their ids")
        for key, value in declared.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 9):
                _refuse(field, repr(key)[:80], "the id of a token")
            token = _token(value, f"{field}: {key}")
            if isinstance(token, str):
                _refuse(f"{field}: {key}", "text", "an object with content")
            self._by_id[int(key)] = token

    def _read_added(self, special: Collection[str], path: Path) -> None:
        self._where = path
        for content, number in _read_object(path).items():
            if type(number) is not int:
                _refuse(f"{path}: {content}", repr(number)[:80], "the id of the token")
            self._by_id[number] = AddedToken(content, normalized=content not in special, special=content in special)


def _read_fields(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Named tokens of tokenizer_config.json, those that are only of this model under `_SPECIFIC`, and further ones."""
    fields, specific = dict[str, Any](), dict[str, _Named]()
    for name, value in config.items():
        if name.endswith("_token") and (token := _optional(value, f"{path}: {name}")) is not None:
            (fields if name in _STANDARD or not isinstance(token, str) else specific)[name] = token
    for name in (_FURTHER, _ADDITIONAL):
        further = config.get(name)
        if isinstance(further, dict) and name == _FURTHER:
            specific |= {key: _token(value, f"{path}: {name}: {key}") for key, value in further.items()}
        elif isinstance(further, list):
            fields[name] = [_token(value, f"{path}: {name}") for value in further]
        elif further is not None:
            _refuse(f"{path}: {name}", type(further).__name__, "a list of tokens, or an object of named ones")
    if not config.get(_FURTHER) and _ADDITIONAL in fields:
        fields[_FURTHER] = fields.pop(_ADDITIONAL)
    specific_fields = config.get(_SPECIFIC)
    if not specific and isinstance(specific_fields, dict):
        specific = {key: _token(value, f"{path}: {_SPECIFIC}: {key}") for key, value in specific_fields.items()}
    return fields | ({_SPECIFIC: specific} if specific else {})


def _read_map(before: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The fields of special_tokens_map.json, which replace those of the same names."""
    fields: dict[str, Any] = {}
    for name, value in _read_object(path).items():
        field = f"{path}: {name}"
        if name.endswith("_token"):
            if (token := _optional(value, field)) is not None:
                fields[name] = token if isinstance(token, str) else _as_added(token, special=True)
        elif name == _FURTHER and isinstance(value, dict):
            specific = {key: _token(text, f"{field}: {key}") for key, text in value.items()}
            fields[_SPECIFIC] = before.get(_SPECIFIC, {}) | specific
        elif name in (_FURTHER, _ADDITIONAL):
            if not isinstance(value, list):
                _refuse(field, type(value).__name__, "a list of tokens")
            listed = [_token(text, field) for text in value]
            marked = [text if isinstance(text, str) else _as_added(text, special=True) for text in listed]
            earlier = before.get(_FURTHER, []) if name == _FURTHER else []
            fields[name] = [*earlier, *(token for token in marked if token not in earlier)]
    return fields


def _listed(fields: Mapping[str, Any]) -> list[_Named]:
    """The tokens with standard names, and further ones."""
    return [*(fields[name] for name in _STANDARD if name in fields), *fields.get(_FURTHER, [])]


def _optional(value: object, field: str) -> _Named | None:
    """A token; None for a field that is null, or a switch such as add_bos_token."""
    return None if value is None or isinstance(value, bool) else _token(value, field)


def _token(value: object, field: str) -> _Named:
    """A token of a file: text, or an object with its flags."""
    if isinstance(value, str):
        return value
    try:
        return convert(value, _Token).added()
    except msgspec.ValidationError as error:
        _refuse(field, error, "a token: text, or an object with content, lstrip, rstrip, normalized and single_word")


def _as_added(token: _Named, *, special: bool) -> AddedToken:
    """A token with its flags; text is special."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    return AddedToken(**{**token.__getstate__(), "special": True}) if special and not token.special else token


def _check_config(config: Mapping[str, Any], path: Path, tokenizer: Tokenizer) -> None:
    """Refuse fields that change tokens and are not supported."""
    if config.get("split_special_tokens"):
        _refuse(f"{path}: split_special_tokens", "true", "false, as special tokens in texts are read as such")
    others = config.get("fast_tokenizer_files") or [TOKENIZER]
    if others != [TOKENIZER]:
        _refuse(f"{path}: fast_tokenizer_files", str(others)[:80], f"{TOKENIZER} alone")
    if config.get("fix_mistral_regex") and tokenizer.get_vocab_size() > _PATCHED_VOCAB:
        splits = json.loads(tokenizer.to_str())["pre_tokenizer"]
        if _PATCHED_SPLIT not in json.dumps(splits, ensure_ascii=False).replace("\\\\", "\\"):
            _refuse(f"{path}: fix_mistral_regex", "true", f"false, or a {TOKENIZER} whose pre-tokenizer has that fix")


def _template_files(folder: Path) -> dict[str, str]:
    """Files of templates; if there are some, the templates of tokenizer_config.json do not count."""
    paths = [folder / TEMPLATE, *sorted((folder / FURTHER_TEMPLATES).glob("*.jinja"))]
    return {DEFAULT if path.parent == folder else path.stem: _read_text(path) for path in paths if path.is_file()}


def _processor_template(folder: Path) -> dict[str, str]:
    """The template of the processor of a checkpoint that reads pictures."""
    for name in (PROCESSOR_CONFIGS[0], PROCESSOR_TEMPLATE, PROCESSOR_CONFIGS[1]):
        value = _read_object(folder / name).get("chat_template")
        if value is None:
            continue
        if name == PROCESSOR_TEMPLATE and any((folder / FURTHER_TEMPLATES).glob("*.jinja")):
            fix = f"Rename {PROCESSOR_TEMPLATE}, or move its template to {TEMPLATE}."
            got, expected = f"beside {FURTHER_TEMPLATES}", "one of them, as transformers refuses both"
            raise CheckpointError(str(folder / name), got=got, expected=expected, fix=fix)
        if isinstance(value, dict) and value and all(isinstance(text, str) for text in value.values()):
            return {str(key): str(text) for key, text in value.items()}
        return _configured(value, folder / name)
    return {}


def _configured(value: object, path: Path) -> dict[str, str]:
    """Templates of a JSON file: one as text, or several as a list of names and templates."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    entries = value if isinstance(value, list) else []
    named = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    if len(named) != len(entries) or not named:
        raise CheckpointError(
            f"{path}: chat_template",
            got=type(value).__name__,
            expected="a template, or a list of objects with name and template",
            fix="Fetch it again.",
        )
    return named


def _refuse(field: str, got: object, expected: str) -> NoReturn:
    raise CheckpointError(field, got=got, expected=expected, fix="Correct the file, or fetch it again.")


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        content = error
    if isinstance(content, dict):
        return content
    raise CheckpointError(str(path), got=str(content)[:80], expected="a JSON object", fix="Fetch it again.")


def _read_text(path: Path) -> str:
    if (size := path.stat().st_size) > _LARGEST_FILE_BYTES:
        limit = f"at most {_LARGEST_FILE_BYTES:,} bytes"
        raise CheckpointError(str(path), got=f"{size:,} bytes", expected=limit, fix="Fetch it again.")
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(str(path), got=error, expected="UTF-8 text", fix="Fetch it again.") from None
