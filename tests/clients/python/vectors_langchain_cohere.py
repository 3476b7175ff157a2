"""The cells of langchain-cohere."""

from __future__ import annotations

from typing import Any

from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_core.documents import Document
from vector_cells import (
    MODEL,
    RERANKER,
    TARGET,
    TEXTS,
    check_ranked_texts,
    check_ranking,
    check_refused_key,
    check_too_long,
    check_vector,
    check_vectors,
    run,
)


def embedder(key: str = TARGET.key, **fields: Any) -> CohereEmbeddings:
    fields = {"base_url": TARGET.url, "cohere_api_key": key, "max_retries": 1} | fields
    return CohereEmbeddings(model=MODEL, **fields)


def reranker(count: int | None = None) -> CohereRerank:
    fields = {"base_url": TARGET.rerank_url, "cohere_api_key": TARGET.key, "top_n": count}
    return CohereRerank(model=RERANKER, **fields)


def rerank() -> None:
    found = reranker().rerank(TEXTS, TARGET.query)
    check_ranking([(entry["index"], entry["relevance_score"]) for entry in found])
    found = reranker(2).rerank(TEXTS, TARGET.query)
    check_ranking([(entry["index"], entry["relevance_score"]) for entry in found], 2)
    documents = [Document(text) for text in TEXTS]
    ranked = reranker().compress_documents(documents, TARGET.query)
    check_ranked_texts([(each.page_content, each.metadata["relevance_score"]) for each in ranked])


run(
    "langchain-cohere",
    one=lambda: check_vector(embedder().embed_query(TEXTS[0]), TARGET.vectors[0]),
    many=lambda: check_vectors(embedder().embed_documents(TEXTS)),
    rerank=rerank,
    too_long=lambda: check_too_long(lambda: embedder(truncate="NONE").embed_query(TARGET.long)),
    wrong_key=lambda: check_refused_key(lambda: embedder("wrong").embed_query(TEXTS[0])),
)
