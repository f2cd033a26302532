"""Tokens of texts: the only place that opens `tokenizer.json` and encodes with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekv.errors import EdgeKVError, UsageError
from edgekv.spec.growth import MAX_ADDED, MAX_FACTOR, tokenizer_growth

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CUT = "\ufdd0\ufdd1"
"""Noncharacters that stand within a special token's text where it is ordinary text; see `as_plain`."""
LARGEST_BYTES = 1 << 28
"""Largest `tokenizer.json` that is read; that of Gemma 3, with 262,144 tokens, has 33 MB."""
_FIX = "Fetch tokenizer.json again; if it still fails, it is broken or needs another version of tokenizers."


def open_tokenizer(path: str | Path, error: type[EdgeKVError] = UsageError, fix: str = _FIX) -> Tokenizer:
    """The tokenizer of a file, without truncation and padding.

    A `tokenizer.json` may ask for both. They would silently truncate or pad prompts and calibration text.

    Args:
        path: the `tokenizer.json`.
        error: raised if the file is missing or cannot be read.
        fix: the fix that the error names.

    Raises:
        EdgeKVError: of the type `error`.
    """
    from tokenizers import Tokenizer

    expected = "a tokenizer.json that the tokenizers library reads"
    if not Path(path).is_file():
        raise error(str(path), got="no such file", expected=expected, fix=fix)
    if (size_bytes := Path(path).stat().st_size) > LARGEST_BYTES:
        raise error(str(path), got=f"{size_bytes:,} bytes", expected=f"at most {LARGEST_BYTES:,}", fix=fix)
    try:
        with _no_panic(str(path), error):
            for work, growth in tokenizer_growth(Path(path).read_bytes()).items():
                if not growth.is_accepted:
                    limit = f"at most {MAX_FACTOR} times and {MAX_ADDED:,} more"
                    raise error(f"{path}: {work}", got=growth, expected=limit, fix="Use another tokenizer.json.")
            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.no_truncation()
            tokenizer.no_padding()
    except EdgeKVError:
        raise
    except Exception as reason:  # the library raises a bare Exception
        raise error(str(path), got=reason, expected=expected, fix=fix) from None
    return tokenizer


def begins_with(tokens: Sequence[int], first: Sequence[int], at: int = 0) -> bool:
    """Whether a text, from the token `at` on, has the first tokens of all texts already: they are not put in twice."""
    return list(tokens[at : at + len(first)]) == list(first)


def encode(
    tokenizer: Tokenizer, text: str, *, vocab: int | None = None, field: str = "prompt", add_special_tokens: bool = True
) -> list[int]:
    """The tokens of a text.

    Args:
        tokenizer: as `open_tokenizer` gives it.
        text: any Unicode text.
        vocab: number of the model's embeddings; the tokenizer may know more tokens.
        field: name of the text in errors.
        add_special_tokens: whether to add those that the tokenizer's template adds, such as BOS.

    Raises:
        UsageError: the text is not Unicode (an argument in another encoding), the tokenizer fails, or the text has a
            token beyond the vocabulary, such as one for images.
    """
    tokens = list(_encoded(tokenizer, text, field, add_special_tokens).ids)
    _check_ids(tokenizer, tokens, vocab, field)
    return tokens


def encode_around(tokenizer: Tokenizer, text: str, *, vocab: int, field: str) -> tuple[list[int], list[int], list[int]]:
    """The tokens that the tokenizer's template adds in front of a text, those of the text, and those added behind it.

    Raises:
        UsageError: as `encode`.
    """
    encoding = _encoded(tokenizer, text, field, True)
    _check_ids(tokenizer, encoding.ids, vocab, field)
    added = encoding.special_tokens_mask
    first = next((at for at, is_added in enumerate(added) if not is_added), len(added))
    stop = next((at for at in range(len(added), first, -1) if not added[at - 1]), first)
    return encoding.ids[:first], encoding.ids[first:stop], encoding.ids[stop:]


def encode_with_places(tokenizer: Tokenizer, text: str, *, vocab: int, field: str) -> tuple[list[int], list[int]]:
    """The tokens of a text, without added special tokens, and where each begins in it, in characters.

    Raises:
        UsageError: as `encode`.
    """
    encoding = _encoded(tokenizer, text, field, False)
    _check_ids(tokenizer, encoding.ids, vocab, field)
    return encoding.ids, [start for start, _ in encoding.offsets]


def encode_pair(
    tokenizer: Tokenizer, first: str, second: str, *, vocab: int, field: str
) -> tuple[list[int], list[int]]:
    """The tokens of two texts as the tokenizer joins them, and where those of the second begin in it, in characters.

    Raises:
        UsageError: as `encode`.
    """
    encoding = _encoded(tokenizer, first, field, True, second)
    _check_ids(tokenizer, encoding.ids, vocab, field)
    pairs = zip(encoding.offsets, encoding.sequence_ids, strict=True)
    return encoding.ids, [start for (start, _), number in pairs if number == 1]


def _check_ids(tokenizer: Tokenizer, tokens: Sequence[int], vocab: int | None, field: str) -> None:
    for token in tokens:
        if vocab is not None and token >= vocab:
            got = f"the token {tokenizer.id_to_token(token)!r} with id {token}"
            raise UsageError(field, got=got, expected=f"ids below {vocab}, the vocabulary", fix="Leave it out.")


def as_plain(value: Any, token: str) -> Any:
    """A value of JSON whose texts have a cut within the text of a token, so that `encode_cut` gives ordinary tokens."""
    if isinstance(value, str):
        return value.replace(token, token[:1] + CUT + token[1:])
    if isinstance(value, Mapping):
        return {name: as_plain(member, token) for name, member in value.items()}
    return [as_plain(member, token) for member in value] if isinstance(value, (list, tuple)) else value


def encode_cut(tokenizer: Tokenizer, text: str, *, vocab: int, field: str) -> list[int]:
    """The tokens of a text between its cuts, without added special tokens.

    Raises:
        UsageError: as `encode`.
    """
    pieces = (encode(tokenizer, piece, vocab=vocab, field=field, add_special_tokens=False) for piece in text.split(CUT))
    return [token for piece in pieces for token in piece]


def text_offsets(tokenizer: Tokenizer, text: str) -> list[int]:
    """Where each token of a text begins in it, in characters; tokens that the tokenizer's template adds have no text.

    Raises:
        UsageError: as `encode`.
    """
    encoding = _encoded(tokenizer, text, "prompt", True)
    offsets, end = list[int](), 0
    for (start, stop), is_added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
        offsets.append(end if is_added else min(start, end))  # some tokenizers leave out the space before a word
        end = max(end, stop)
    return offsets


def _encoded(
    tokenizer: Tokenizer, text: str, field: str, add_special_tokens: bool, pair: str | None = None
) -> Encoding:
    try:
        for part in (text, pair or ""):
            part.encode()
    except UnicodeEncodeError as error:
        fix = "Give it as UTF-8, or in a file."
        raise UsageError(field, got=error, expected="Unicode text", fix=fix) from None
    try:
        with _no_panic(TOKENIZER, UsageError):
            return tokenizer.encode(text, pair, add_special_tokens=add_special_tokens)
    except EdgeKVError:
        raise
    except Exception as error:  # the library raises a bare Exception
        raise UsageError(TOKENIZER, got=error, expected=f"a tokenizer that encodes the {field}", fix=_FIX) from None


@contextmanager
def _no_panic(field: str, error: type[EdgeKVError]) -> Iterator[None]:
    """Convert a panic of the Rust library to an EdgeKVError: it derives directly from BaseException."""
    try:
        yield
    except BaseException as panic:
        refuse_panic(panic, field, error)
        raise


def refuse_panic(panic: BaseException, field: str, error: type[EdgeKVError]) -> None:
    """Raise an EdgeKVError for a panic of the Rust library; nothing happens for another exception."""
    if type(panic).__name__ == "PanicException":
        got = f"a panic in the tokenizers library: {panic}"
        raise error(field, got=got, expected="a tokenizer that works", fix=_FIX) from None
