"""The tokenizer of a checkpoint and its special tokens, checked against the vocabulary."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from edgekv.errors import CheckpointError, EdgeKVWarning, UsageError
from edgekv.spec.chat import DEFAULT, ChatTemplates

_ANSWER = "42 is it."  # no template writes it


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Token ids; `eos` may hold several.

    Attributes:
        named: the tokenizer's own tokens by their names, such as `eos_token`.
    """

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    named: dict[str, str]


def special_tokens(
    config: dict[str, Any], generation: dict[str, Any], tokenizer: Tokenizer, vocab: int, named: Mapping[str, str]
) -> SpecialTokens:
    """The special tokens of a configuration; generation_config.json goes first.

    Args:
        config: of the model.
        generation: of generation_config.json.
        tokenizer: has the tokens.
        vocab: number of the model's embeddings.
        named: the tokenizer's own tokens by name, of which `eos_token` ends a text too.

    Raises:
        CheckpointError: one is no token of the tokenizer below `vocab`.
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else {}

    def pick(name: str) -> tuple[int, ...]:
        value = generation.get(name)
        value = config.get(name) if value is None else value
        value = text.get(name) if value is None else value
        ids = tuple(value) if isinstance(value, list) else () if value is None else (value,)
        for token in ids:
            known = type(token) is int and 0 <= token < vocab and tokenizer.id_to_token(token) is not None
            if not known:
                raise CheckpointError(
                    name,
                    got=repr(token)[:80],
                    expected=f"the id of a token of tokenizer.json below vocab_size = {vocab}",
                    fix="The tokenizer and the configuration do not belong together; fetch both again.",
                )
        return ids

    bos = pick("bos_token_id")
    pad = () if config.get("pad_token_id") == -1 else pick("pad_token_id")  # some files use -1 for none
    eos = pick("eos_token_id")
    own = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    if own is not None and own < vocab and own not in eos:
        eos = (*eos, own)
    return SpecialTokens(bos[0] if bos else None, eos, pad[0] if pad else None, {**named})


def check_turn_end(chat: ChatTemplates | None, tokenizer: Tokenizer, ends: tuple[int, ...]) -> None:
    """Warn if the chat template ends an answer with a special token at which no answer ends.

    Nothing is said of templates that cannot render a short conversation, or that end an answer with text.
    """
    if chat is None or DEFAULT not in chat.templates:
        return
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        behind = chat.render(turns, add_generation_prompt=False, name=DEFAULT).partition(_ANSWER)[2]
    except UsageError:
        return
    token = next(iter(tokenizer.encode(behind.lstrip(), add_special_tokens=False).ids), None)
    added = tokenizer.get_added_tokens_decoder()
    if token is not None and token in added and added[token].special and token not in ends:
        text = f"the chat template ends an answer with {added[token].content} (id {token}), which is none of the ends"
        text += f" that the checkpoint names ({', '.join(map(str, ends)) or 'none'}): answers may go on after it"
        warnings.warn(EdgeKVWarning(text), stacklevel=2)


def check_vocabulary(tokenizer: Tokenizer, vocab: int, name: str) -> None:
    """Check that every token but special ones is in the vocabulary. Gemma 3's special token for images is beyond it.

    Raises:
        CheckpointError: naming `name`.
    """
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    highest = max(set(tokenizer.get_vocab(with_added_tokens=True).values()) - special, default=-1)
    if highest >= vocab:
        raise CheckpointError(
            name,
            got=f"a token with id {highest}",
            expected=f"ids below vocab_size = {vocab} of config.json",
            fix="This tokenizer belongs to another model; fetch both together.",
        )
