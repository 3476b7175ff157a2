"""The cells of llama-index's OpenAI and Cohere packages, which accept few names of models."""

from __future__ import annotations

from typing import Any

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.cohere import CohereEmbedding
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.postprocessor.cohere_rerank import CohereRerank
from vector_cells import (
    MODEL,
    RERANKER,
    TARGET,
    TEXTS,
    check_raises,
    check_ranked_texts,
    check_refused_key,
    check_too_long,
    check_vector,
    check_vectors,
    run,
)

OF_COHERE = "embed-english-v3.0"  # the server has this name, too


def openai(key: str = TARGET.key, **fields: Any) -> OpenAIEmbedding:
    fields = {"api_base": TARGET.base_url, "api_key": key, "max_retries": 0} | fields
    return OpenAIEmbedding(model_name=MODEL, **fields)


def cohere(key: str = TARGET.key, **fields: Any) -> CohereEmbedding:
    fields = {"base_url": TARGET.url, "api_key": key, "max_retries": 0} | fields
    return CohereEmbedding(**{"model_name": OF_COHERE} | fields)


def many_of_cohere() -> None:
    check_vectors(cohere().get_text_embedding_batch(TEXTS))
    check_raises(lambda: cohere(model_name=MODEL), "not a valid model name")


def rerank() -> None:
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    fields: dict[str, Any] = {"api_key": TARGET.key, "base_url": TARGET.rerank_url}
    ranker = CohereRerank(model=RERANKER, top_n=len(TEXTS), **fields)
    found = ranker.postprocess_nodes(nodes, query_str=TARGET.query)
    check_ranked_texts([(each.node.text, each.score) for each in found])


run(
    "llama-index, OpenAI",
    one=lambda: check_vector(openai().get_query_embedding(TEXTS[0]), TARGET.vectors[0]),
    many=lambda: check_vectors(openai().get_text_embedding_batch(TEXTS)),
    dimensions=lambda: check_vector(
        openai(dimensions=8).get_query_embedding(TEXTS[0]), TARGET.short
    ),
    too_long=lambda: check_too_long(lambda: openai().get_text_embedding(TARGET.long)),
    wrong_key=lambda: check_refused_key(lambda: openai("wrong").get_query_embedding(TEXTS[0])),
)
run(
    "llama-index, Cohere",
    one=lambda: check_vector(cohere().get_query_embedding(TEXTS[0]), TARGET.vectors[0]),
    many=many_of_cohere,
    rerank=rerank,
    too_long=lambda: check_too_long(
        lambda: cohere(truncate="NONE").get_text_embedding(TARGET.long)
    ),
    wrong_key=lambda: check_refused_key(lambda: cohere("wrong").get_query_embedding(TEXTS[0])),
)
