"""The cells of Cohere's own client, with its second API and its first."""

from __future__ import annotations

import base64
import struct
from typing import Any

import cohere
from vector_cells import (
    MODEL,
    RERANKER,
    TARGET,
    TEXTS,
    check_ranking,
    check_refused_key,
    check_too_long,
    check_vector,
    check_vectors,
    run,
)


def second(url: str = TARGET.url, key: str = TARGET.key) -> cohere.ClientV2:
    return cohere.ClientV2(base_url=url, api_key=key)


def first(url: str = TARGET.url, key: str = TARGET.key) -> cohere.Client:
    return cohere.Client(base_url=url, api_key=key)


def embed(texts: list[str], key: str = TARGET.key, **fields: Any) -> Any:
    types = fields.pop("embedding_types", ["float"])
    fields = {"model": MODEL, "input_type": "search_query", "embedding_types": types} | fields
    return second(key=key).embed(texts=texts, **fields).embeddings


def many() -> None:
    check_vectors(embed(TEXTS).float_)
    forms = embed(TEXTS, embedding_types=["base64", "int8", "ubinary"])
    numbers = [
        struct.unpack(f"<{len(TARGET.vectors[0])}f", base64.b64decode(form))
        for form in forms.base64
    ]
    check_vectors(numbers)
    assert len(forms.int8[0]) == 8 * len(forms.ubinary[0]) == len(TARGET.vectors[0])


def rerank() -> None:
    fields: dict[str, Any] = {"model": RERANKER, "query": TARGET.query}
    client = second(TARGET.rerank_url)
    for documents in (TEXTS, [{"text": text} for text in TEXTS]):
        results = client.rerank(documents=documents, **fields).results
        check_ranking([(result.index, result.relevance_score) for result in results])
    results = client.rerank(documents=TEXTS, top_n=2, max_tokens_per_doc=4096, **fields).results
    check_ranking([(result.index, result.relevance_score) for result in results], 2)


def rerank_of_the_first() -> None:
    fields: dict[str, Any] = {"model": RERANKER, "query": TARGET.query, "documents": TEXTS}
    results = first(TARGET.rerank_url).rerank(return_documents=True, **fields).results
    check_ranking([(result.index, result.relevance_score) for result in results])
    assert [TEXTS[result.index] for result in results] == [r.document.text for r in results]


def embed_first(texts: list[str], key: str = TARGET.key, **fields: Any) -> Any:
    fields = {"model": MODEL, "input_type": "search_document"} | fields
    return first(key=key).embed(texts=texts, **fields).embeddings


def many_of_the_first() -> None:
    check_vectors(embed_first(TEXTS))
    check_vectors(embed_first(TEXTS, embedding_types=["float"]).float_)
    many = embed_first(TEXTS * 40)  # the client sends 96 at a time
    assert len(many) == 40 * len(TEXTS)
    check_vectors(many[-len(TEXTS) :])


run(
    "cohere",
    one=lambda: check_vector(embed(TEXTS[:1]).float_[0], TARGET.vectors[0]),
    many=many,
    dimensions=lambda: check_vector(embed(TEXTS[:1], output_dimension=8).float_[0], TARGET.short),
    rerank=rerank,
    too_long=lambda: check_too_long(lambda: embed([TARGET.long], truncate="NONE")),
    wrong_key=lambda: check_refused_key(lambda: embed(TEXTS, "wrong")),
)
run(
    "cohere, first API",
    one=lambda: check_vector(embed_first(TEXTS[:1])[0], TARGET.vectors[0]),
    many=many_of_the_first,
    rerank=rerank_of_the_first,
    too_long=lambda: check_too_long(lambda: embed_first([TARGET.long], truncate="NONE")),
    wrong_key=lambda: check_refused_key(lambda: embed_first(TEXTS, "wrong")),
)
