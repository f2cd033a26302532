"""`POST /v1/rerank`, in the form that Jina, Cohere and vLLM share."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar
from uuid import uuid4

import msgspec

from edgekv.embed import Ranker
from edgekv.engine import Request
from edgekv.serve.answers import TextUsage, run_all
from edgekv.serve.embeddings import MAX_TEXTS
from edgekv.serve.errors import ApiError, refused
from edgekv.serve.fields import UnsupportedField, check_fields, within
from edgekv.serve.http import Exchange, read_json
from edgekv.serve.service import Service


class TextDocument(msgspec.Struct, frozen=True):
    """A document as an object."""

    text: str


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request.

    Attributes:
        instruction: what the query asks for; not in Jina's and Cohere's APIs.
        truncate_prompt_tokens: as vLLM has it: documents are cut at their end where they have more tokens with the
            query; -1 for the longest text.
    """

    unsupported: ClassVar[dict[str, UnsupportedField]] = {
        "max_chunks_per_doc": UnsupportedField("It is not supported; leave it out."),
        "rank_fields": UnsupportedField("Send documents as texts."),
    }

    query: str
    documents: list[str | TextDocument]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None

    @property
    def texts(self) -> list[str]:
        """The documents.

        Raises:
            ApiError: none, or too many.
        """
        if not 1 <= len(self.documents) <= MAX_TEXTS:
            got, expected = f"{len(self.documents):,} documents", f"1 to {MAX_TEXTS:,}"
            raise refused("documents", got=got, expected=expected, fix="Send several requests.")
        return [document if isinstance(document, str) else document.text for document in self.documents]

    def name_of(self, field: str) -> str | None:
        """The request's name of a field in an error; None if it has no such field."""
        return within(field, self.__struct_fields__)


class RerankResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """A document: its place in the request, its score, and the text if the request asks for it."""

    index: int
    relevance_score: float
    document: TextDocument | None = None


class RerankResults(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: the documents, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: TextUsage


async def rerank(service: Service, exchange: Exchange) -> None:
    """Judge documents.

    Raises:
        ApiError, EdgeKVError: the request is refused.
        DisconnectedError: the client has gone.
    """
    body = await exchange.body()

    def read() -> tuple[RerankRequest, Ranker, list[str], list[Request]]:
        asked = read_json(body, RerankRequest)
        check_fields(body, asked.__struct_fields__, {}, asked.unsupported)
        exchange.name_of = asked.name_of
        lora = service.check_name(asked.model)
        if service.model.bundle.manifest.task is None:
            message = f"rerank: {service.name} generates text and ranks nothing. Ask a server with a reranker."
            raise ApiError(400, message, code="not_supported")
        ranker, texts = Ranker(service.model.bundle, service.texts), asked.texts
        cut_to = ranker.cut_to(asked.truncate_prompt_tokens, "truncate_prompt_tokens")
        if asked.top_n is not None and asked.top_n < 1:
            raise refused("top_n", got=asked.top_n, expected="at least 1", fix="Leave it out for all.")
        ranker.check(asked.query, asked.instruction)
        requests = list[Request]()
        for number, text in enumerate(texts):
            exchange.check()
            field, told = f"documents[{number}]", asked.instruction
            made = ranker.read(asked.query, text, field, instruction=told, cut_to=cut_to).request
            requests.append(replace(made, lora=lora, salt=exchange.cache_salt))
        return asked, ranker, texts, requests

    asked, ranker, texts, requests = await service.work.run(exchange, "text", read)
    rows_of_texts = await run_all(service, exchange, requests)
    results = [
        RerankResult(
            document.index, document.score, TextDocument(texts[document.index]) if asked.return_documents else None
        )
        for document in ranker.ranked([ranker.score(rows) for rows in rows_of_texts], asked.top_n)
    ]
    tokens = sum(len(request.tokens) for request in requests)
    usage, name = TextUsage(tokens, tokens), asked.model or service.name
    await exchange.reply(RerankResults(id=f"rerank-{uuid4().hex}", model=name, results=results, usage=usage))
