"""The cells of LiteLLM, by the prefixes of its providers."""

from __future__ import annotations

from functools import partial
from typing import Any

import litellm
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

litellm.suppress_debug_info = True
# Where each provider finds the server.
EMBEDDERS = {
    "openai": TARGET.base_url,
    "hosted_vllm": TARGET.base_url,
    "jina_ai": TARGET.base_url,
    "cohere": f"{TARGET.url}/v2/embed",
}
RERANKERS = {
    "cohere": TARGET.rerank_url,
    "hosted_vllm": TARGET.rerank_url,
    "jina_ai": TARGET.rerank_url,
    "huggingface": TARGET.rerank_url,
}
# LiteLLM knows the models of these providers that have shorter vectors, and refuses all others.
ALLOWED = {"allowed_openai_params": ["dimensions"]}


def embed(provider: str, texts: Any, key: str = TARGET.key, **fields: Any) -> list[Any]:
    server = {"api_base": EMBEDDERS[provider], "api_key": key, "num_retries": 0}
    answer = litellm.embedding(f"{provider}/{MODEL}", input=texts, **server, **fields)
    return [entry["embedding"] for entry in answer.data]


def rerank(provider: str) -> None:
    server: dict[str, Any] = {"api_base": RERANKERS[provider], "api_key": TARGET.key}
    for count in (len(TEXTS), 2):
        fields = {"query": TARGET.query, "documents": TEXTS, "top_n": count}
        found = litellm.rerank(f"{provider}/{RERANKER}", **fields, **server).results
        check_ranking([(entry["index"], entry["relevance_score"]) for entry in found], count)


def shorter(provider: str) -> None:
    [found] = embed(provider, [TEXTS[0]], dimensions=8, **ALLOWED)
    check_vector(found, TARGET.short)


def one(provider: str) -> None:
    check_vector(embed(provider, [TEXTS[0]])[0], TARGET.vectors[0])


def many(provider: str) -> None:
    check_vectors(embed(provider, TEXTS))


def too_long(provider: str) -> None:
    cut = {"truncate": "NONE"} if provider == "cohere" else {}
    check_too_long(lambda: embed(provider, [TARGET.long], **cut))


def wrong_key(provider: str) -> None:
    check_refused_key(lambda: embed(provider, TEXTS, "wrong"))


for name in {**EMBEDDERS, **RERANKERS}:
    cells: dict[str, Any] = {}
    if name in EMBEDDERS:
        cells = {"one": one, "many": many, "too_long": too_long, "wrong_key": wrong_key}
        cells["dimensions"] = shorter
    if name in RERANKERS:
        cells["rerank"] = rerank
    run(f"litellm, {name}", **{cell: partial(call, name) for cell, call in cells.items()})
