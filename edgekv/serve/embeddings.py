"""`POST /v1/embeddings`."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace
from typing import ClassVar

import msgspec
import numpy as np

from edgekv.embed import Embedder, ReadText
from edgekv.serve.answers import TextUsage, run_all
from edgekv.serve.errors import ApiError, refused
from edgekv.serve.fields import UnsupportedField, check_fields, within
from edgekv.serve.http import Exchange, read_json
from edgekv.serve.service import Service

MAX_TEXTS = 2048
"""As OpenAI's API has it."""

_FORMATS = ("float", "base64")


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request.

    Attributes:
        input: a text or its token ids, or several.
        prompt_name: whose text the bundle puts in front of each; not in OpenAI's API.
        truncate_prompt_tokens: as vLLM has it: texts of more tokens are cut at their end; -1 for the longest text.
    """

    unsupported: ClassVar[dict[str, UnsupportedField]] = {
        "add_special_tokens": UnsupportedField("Send token ids for a text without them.", (True,)),
        "normalize": UnsupportedField("Embeddings are as the checkpoint has them; leave it out."),
        "task_type": UnsupportedField("Use prompt_name."),
        "input_type": UnsupportedField("Use prompt_name."),
    }

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None

    @property
    def texts(self) -> list[str | list[int]]:
        """Each text, or its token ids.

        Raises:
            ApiError: no text, too many, or a mixture.
        """
        if isinstance(self.input, str):
            return [self.input]
        kinds = {type(part) for part in self.input}
        if len(kinds) != 1:
            got = "an empty list" if not kinds else "a mixture"
            raise refused("input", got=got, expected="texts or token ids", fix="Give a text, or a list of one kind.")
        if kinds == {int}:
            return [[part for part in self.input if isinstance(part, int)]]
        if len(self.input) > MAX_TEXTS:
            got, fix = f"{len(self.input):,} texts", "Send several requests."
            raise refused("input", got=got, expected=f"at most {MAX_TEXTS:,}", fix=fix)
        return [part for part in self.input if not isinstance(part, int)]

    def field(self, index: int) -> str:
        """The place of a text in the request."""
        return f"input[{index}]" if isinstance(self.input, list) and not isinstance(self.input[0], int) else "input"

    def name_of(self, field: str) -> str | None:
        """The request's name of a field in an error; None if it has no such field."""
        return within(field, self.__struct_fields__)


class EmbeddingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An embedding: a list of numbers, or float32 in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    data: list[EmbeddingRecord]
    model: str
    usage: TextUsage
    object: str = "list"


async def embeddings(service: Service, exchange: Exchange) -> None:
    """Embed texts.

    Raises:
        ApiError, EdgeKVError: the request is refused.
        DisconnectedError: the client has gone.
    """
    body = await exchange.body()

    def read() -> tuple[EmbeddingRequest, Embedder, list[ReadText], int]:
        asked = read_json(body, EmbeddingRequest)
        check_fields(body, asked.__struct_fields__, {}, asked.unsupported)
        exchange.name_of = asked.name_of
        lora = service.check_name(asked.model)
        if service.model.bundle.manifest.task is None:
            message = f"embeddings: {service.name} generates text and has no embeddings. Ask a server with an embedder."
            raise ApiError(400, message, code="not_supported")
        embedder = Embedder(service.model.bundle, service.texts)
        if asked.encoding_format not in (None, *_FORMATS):
            got = repr(asked.encoding_format[:40])
            raise refused("encoding_format", got=got, expected=" or ".join(_FORMATS), fix="Leave it out.")
        width, prompt = embedder.check_dimensions(asked.dimensions), embedder.prompt(asked.prompt_name)
        texts, cut_to = list[ReadText](), embedder.cut_to(asked.truncate_prompt_tokens, "truncate_prompt_tokens")
        for number, text in enumerate(asked.texts):
            exchange.check()
            made = embedder.read(text, asked.field(number), prompt=prompt, cut_to=cut_to)
            request = replace(made.request, lora=lora, salt=exchange.cache_salt)
            texts.append(replace(made, request=request))
        return asked, embedder, texts, width

    asked, embedder, texts, width = await service.work.run(exchange, "text", read)
    rows_of_texts = await run_all(service, exchange, [text.request for text in texts])

    def write() -> EmbeddingList:
        data = list[EmbeddingRecord]()
        for index, (text, rows) in enumerate(zip(texts, rows_of_texts, strict=True)):
            vector = embedder.embedding(text, rows, width)
            is_packed = asked.encoding_format == "base64"
            packed = b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode() if is_packed else vector.tolist()
            data.append(EmbeddingRecord(index=index, embedding=packed))
        tokens = sum(text.tokens for text in texts)
        usage = TextUsage(tokens, tokens)
        return EmbeddingList(data=data, model=asked.model or service.name, usage=usage)

    await exchange.reply(await service.work.run(exchange, "text", write))
