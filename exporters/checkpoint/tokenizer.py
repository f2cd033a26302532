"""The tokenizer and the chat templates of a Hugging Face folder: all files that transformers' `from_pretrained` opens.

`tests/golden/texts.py` changes each file and field, and compares with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from tokenizers import AddedToken, Tokenizer

from edgekv.errors import CheckpointError
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

_PATCHED_VOCAB = 100_000
_PATCHED_SPLIT = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*"
"""Of transformers' correction of Mistral's pre-tokenizer, which it applies to larger vocabularies than that."""
_LARGEST_FILE_BYTES = 1 << 24
_FIX = "Fetch it again, together with the checkpoint, or let AutoTokenizer of transformers load and save the tokenizer."


class _Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An added token, as transformers writes it."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None
    special: bool = False
    type_: str = msgspec.field(default="AddedToken", name="__type")

    def added(self, *, special: bool) -> AddedToken:
        normalized = not special if self.normalized is None else self.normalized
        flags = {"lstrip": self.lstrip, "rstrip": self.rstrip, "single_word": self.single_word}
        return AddedToken(self.content, **flags, normalized=normalized, special=special)


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
        named = {name: token.content for name, token in special.named.items()}
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
        found = ChatTemplates(templates=templates, tokens=dict(self.named), reads_parts=reads_pictures)
        found.check(str(folder))
        return found


class _SpecialTokens:
    """The tokens that the files beside `tokenizer.json` name.

    `added_tokens_decoder` of tokenizer_config.json replaces special_tokens_map.json and added_tokens.json.

    Attributes:
        named: by the names of their fields.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.named: dict[str, AddedToken] = {}
        self._further: list[AddedToken] = []
        self._by_id: dict[int, AddedToken] = {}
        self._is_legacy = config.get("added_tokens_decoder") is None
        self._where = folder / CONFIG
        self._name_all(config, folder / CONFIG, special=False)
        if not self._is_legacy:
            self._read_decoder(config["added_tokens_decoder"], folder / CONFIG)
            return
        self._name_all(_read_object(folder / TOKENS_MAP), folder / TOKENS_MAP, special=True)
        self._where = folder / ADDED_TOKENS
        special = {token.content for token in (*self.named.values(), *self._further)}
        for content, number in _read_object(folder / ADDED_TOKENS).items():
            if type(number) is not int:
                _refuse(f"{folder / ADDED_TOKENS}: {content}", repr(number)[:80], "the id of the token")
            is_special = content in special
            self._by_id[number] = AddedToken(content, normalized=not is_special, special=is_special)

    def add_to(self, tokenizer: Tokenizer, known: Mapping[int, AddedToken]) -> None:
        """Add what the tokenizer does not have; where it has a token with other flags, these flags hold.

        Raises:
            CheckpointError: a token would get another id than the files say.
        """
        declared = dict(self._by_id)
        if self._is_legacy:
            self._by_id |= known
        by_content = {token.content: token for token in self._by_id.values()}
        self.named = {name: by_content.get(token.content, token) for name, token in self.named.items()}
        flags = {repr(token) for token in known.values()}
        added = [token for _, token in sorted(self._by_id.items()) if repr(token) not in flags]
        contents = {token.content for token in (*known.values(), *added)}
        for token in (*self.named.values(), *self._further):
            if token.content not in contents:
                added.append(token)
                contents.add(token.content)
        names = {token.content for token in self.named.values()}
        tokenizer.add_tokens([_as_special(token) if token.content in names else token for token in added])
        for number, token in sorted(declared.items()):
            found = tokenizer.token_to_id(token.content)
            if found != number:
                _refuse(f"{self._where}: {token.content}", f"id {number}", f"{found}, its id in tokenizer.json")

    def _name_all(self, fields: Mapping[str, Any], path: Path, *, special: bool) -> None:
        """Take the named tokens of a file, and further special tokens; whether all are special, whatever they say."""
        named = {name: value for name, value in fields.items() if name.endswith("_token")}
        field = "extra_special_tokens" if fields.get("extra_special_tokens") else "additional_special_tokens"
        further = fields.get(field) or []
        if isinstance(further, dict):
            named |= further
        elif isinstance(further, list):
            self._further += [_token(each, f"{path}: {field}", special=special) for each in further]
        else:
            _refuse(f"{path}: {field}", type(further).__name__, "a list of tokens, or an object of named ones")
        if isinstance(specific := fields.get("model_specific_special_tokens"), dict):
            named |= specific
        for name, value in named.items():
            if value is not None and not isinstance(value, bool):  # add_bos_token is a switch
                self.named[name] = _token(value, f"{path}: {name}", special=special)

    def _read_decoder(self, found: object, path: Path) -> None:
        field = f"{path}: added_tokens_decoder"
        if not isinstance(found, dict):
            _refuse(field, type(found).__name__, "an object of tokens by their ids")
        for key, value in found.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 9):
                _refuse(field, repr(key)[:80], "the id of a token")
            if isinstance(value, str):
                _refuse(f"{field}: {key}", "text", "an object with content")
            self._by_id[int(key)] = _token(value, f"{field}: {key}", special=False)


def _as_special(token: AddedToken) -> AddedToken:
    return token if token.special else AddedToken(**{**token.__getstate__(), "special": True})


def _token(value: object, field: str, *, special: bool) -> AddedToken:
    """A token of a file: text, which is special, or an object with its flags."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    try:
        found = msgspec.convert(value, _Token)
    except msgspec.ValidationError as error:
        _refuse(field, error, "a token: text, or an object with content, lstrip, rstrip, normalized and single_word")
    return found.added(special=special or found.special)


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
            found, wanted = f"beside {FURTHER_TEMPLATES}", "one of them, as transformers refuses both"
            raise CheckpointError(str(folder / name), got=found, expected=wanted, fix=fix)
        if isinstance(value, dict) and value and all(isinstance(each, str) for each in value.values()):
            return {str(key): str(each) for key, each in value.items()}
        return _configured(value, folder / name)
    return {}


def _configured(value: object, path: Path) -> dict[str, str]:
    """Templates of a JSON file: one as text, or several as a list of names and templates."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    entries = value if isinstance(value, list) else []
    found = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    if len(found) != len(entries) or not found:
        raise CheckpointError(
            f"{path}: chat_template",
            got=type(value).__name__,
            expected="a template, or a list of objects with name and template",
            fix="Fetch it again.",
        )
    return found


def _refuse(field: str, found: object, wanted: str) -> NoReturn:
    raise CheckpointError(field, got=found, expected=wanted, fix="Correct the file, or fetch it again.")


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        found = error
    if isinstance(found, dict):
        return found
    raise CheckpointError(str(path), got=str(found)[:80], expected="a JSON object", fix="Fetch it again.")


def _read_text(path: Path) -> str:
    if (size := path.stat().st_size) > _LARGEST_FILE_BYTES:
        limit = f"at most {_LARGEST_FILE_BYTES:,} bytes"
        raise CheckpointError(str(path), got=f"{size:,} bytes", expected=limit, fix="Fetch it again.")
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(str(path), got=error, expected="UTF-8 text", fix="Fetch it again.") from None
