"""`POST /tokenize` and `/detokenize`, which harnesses ask for; the fields of llama.cpp's server and of vLLM."""

from __future__ import annotations

import msgspec

from edgekv.serve.errors import refused
from edgekv.serve.http import Exchange, read_json
from edgekv.serve.service import Service
from edgekv.text.output import decode


class TokenizeRequest(msgspec.Struct, frozen=True):
    """A text: `content` (llama.cpp) or `prompt` (vLLM); whether special tokens are added, false or true there."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None


class Tokens(msgspec.Struct, frozen=True):
    """Ids, their number, and the longest context in tokens."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(msgspec.Struct, frozen=True):
    """Token ids."""

    tokens: list[int]


class Text(msgspec.Struct, frozen=True):
    """A text, by both names."""

    content: str
    prompt: str


async def tokenize(service: Service, exchange: Exchange) -> None:
    """The tokens of a text.

    Raises:
        ApiError, UsageError: the request is malformed, or the tokenizer fails.
        DisconnectedError: the client has gone.
    """
    body = await exchange.body()

    def read() -> Tokens:
        asked = read_json(body, TokenizeRequest)
        text = asked.content if asked.prompt is None else asked.prompt
        if text is None or (asked.content is not None and asked.prompt is not None):
            got = "neither" if text is None else "both"
            raise refused("content, prompt", got=got, expected="one of them", fix="Send a text as content.")
        adds_special = asked.add_special if asked.add_special_tokens is None else asked.add_special_tokens
        adds = asked.prompt is not None if adds_special is None else adds_special
        tokens = service.texts.encode(text) if adds else service.texts.encode_chat(text)
        return Tokens(tokens, len(tokens), service.context_length)

    await exchange.reply(await service.work.run(exchange, "text", read))


async def detokenize(service: Service, exchange: Exchange) -> None:
    """The text of tokens, special ones by name.

    Raises:
        ApiError: the request is malformed, or an id is not in the vocabulary.
        DisconnectedError: the client has gone.
    """
    body = await exchange.body()

    def read() -> Text:
        tokens, vocab = read_json(body, DetokenizeRequest).tokens, service.model.bundle.manifest.model.vocab
        if wrong := [token for token in tokens if not 0 <= token < vocab]:
            raise refused("tokens", got=wrong[0], expected=f"0 to {vocab - 1}", fix="Send ids of this model.")
        text = decode(service.texts.tokenizer, tokens, skip_special_tokens=False)
        return Text(text, text)

    await exchange.reply(await service.work.run(exchange, "text", read))
