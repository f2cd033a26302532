"""The special tokens of a GGUF file: which begins a text, and which end one.

Files name a token for each role, but rarely all that end an answer. As llama.cpp does, those are also found by their
text: https://github.com/ggml-org/llama.cpp/issues/9606.
"""

from __future__ import annotations

from dataclasses import dataclass

from exporters.checkpoint.gguf.file import GgufFile

CONTROL = 3
"""llama.cpp's type of tokens that are no text."""

_TOKENS = "tokenizer.ggml.tokens"
_SENTENCE_PIECE = {"bos": 1, "eos": 2, "unknown": 0}  # llama.cpp's ids where a file of this kind has none
_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")  # of the tokens that end an answer
_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<\N{FULLWIDTH VERTICAL LINE}end\N{LOWER ONE EIGHTH BLOCK}of\N{LOWER ONE EIGHTH BLOCK}sentence"
        "\N{FULLWIDTH VERTICAL LINE}>",
        "[e~[",
    }
)
"""Texts of tokens that end an answer, whatever their type."""
_ENDS_OF_ROLES = {  # of tokens for code, where the file does not name one for the role
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_END_OF_TEXT = "</s>"  # in some vocabularies a mark of HTML
_CALLS, _OTHERS = {"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"}
_END_OF_CHANNEL = "<|end|>"  # in vocabularies with both of these, it ends a part of an answer


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids of special tokens; each is one of the vocabulary.

    Attributes:
        bos: begins a text.
        ends: end an answer; the file's end of text is first.
        eos: ends a text.
        pad: fills a batch.
        unknown: stands for what no token is.
    """

    bos: int | None
    ends: tuple[int, ...]
    eos: int | None
    pad: int | None
    unknown: int | None


def special_ids(file: GgufFile) -> SpecialIds:
    """The special tokens that the file names, and those that are known as ends by their text.

    Raises:
        CheckpointError: one that is named is no token.
    """
    tokens = file.texts(_TOKENS)
    roles = {role: _named(file, role, len(tokens)) for role in _ROLES}
    ends = [number for role in _ROLES for number in roles[role]]
    known = {text for role, texts in _ENDS_OF_ROLES.items() if not roles[role] for text in texts} | _ENDS
    kinds = file.entries("tokenizer.ggml.token_type")
    by_text = {text: number for number, text in enumerate(tokens) if text in known}
    if _END_OF_TEXT in tokens and kinds[(at := tokens.index(_END_OF_TEXT)) : at + 1] == [CONTROL]:
        by_text[_END_OF_TEXT] = at
    if _CALLS & by_text.keys() and _OTHERS & by_text.keys():
        by_text.pop(_END_OF_CHANNEL, None)
    ends += sorted(by_text.values())
    unknown, bos = (next(iter(_named(file, role, len(tokens))), None) for role in ("unknown", "bos"))
    pad = next(iter(_named(file, "padding", len(tokens), is_used=False)), None)
    return SpecialIds(bos, tuple(dict.fromkeys(ends)), next(iter(roles["eos"]), None), pad, unknown)


def _named(file: GgufFile, role: str, count: int, *, is_used: bool = True) -> list[int]:
    """The ids of tokens in a role, of which some files list several; an id that is none counts as absent if unused."""
    key = f"tokenizer.ggml.{role}_token_id"
    value = file.one_or_more(key)
    if not value and role in _SENTENCE_PIECE and file.text("tokenizer.ggml.model") == "llama":
        value = [_SENTENCE_PIECE[role]] if _SENTENCE_PIECE[role] < count else []
    for number in value:
        is_id = type(number) is int
        if is_id and not 0 <= number < count and not is_used:
            return []
        if not (is_id and 0 <= number < count):
            raise file.refusal(key, f"0 to {count - 1}", number)
    return value
