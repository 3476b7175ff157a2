"""The cells of llama-index with OpenAI's API and with that of text-embeddings-inference."""

from __future__ import annotations

from typing import Any

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as TeiRerank
from vector_cells import (
    MODEL,
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


def like(key: str = TARGET.key, **fields: Any) -> OpenAILikeEmbedding:
    fields = {"api_base": TARGET.base_url, "api_key": key, "max_retries": 0} | fields
    return OpenAILikeEmbedding(model_name=MODEL, **fields)


def tei(key: str = TARGET.key, **fields: Any) -> TextEmbeddingsInference:
    fields = {"base_url": TARGET.url, "auth_token": key} | fields
    return TextEmbeddingsInference(model_name=MODEL, **fields)


def rerank() -> None:
    # This client sends the token as the whole header.
    token = f"Bearer {TARGET.key}"
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    ranker = TeiRerank(base_url=TARGET.rerank_url, auth_token=token, top_n=len(TEXTS))
    found = ranker.postprocess_nodes(nodes, query_str=TARGET.query)
    check_ranked_texts([(each.node.text, each.score) for each in found])


def cut() -> None:
    """Texts are cut by default. Without that the client takes an error for an answer."""
    assert len(tei().get_text_embedding(TARGET.long)) == len(TARGET.vectors[0])
    check_raises(lambda: tei(truncate_text=False).get_text_embedding(TARGET.long), "KeyError")


run(
    "llama-index, openai-like",
    one=lambda: check_vector(like().get_query_embedding(TEXTS[0]), TARGET.vectors[0]),
    many=lambda: check_vectors(like().get_text_embedding_batch(TEXTS)),
    dimensions=lambda: check_vector(like(dimensions=8).get_query_embedding(TEXTS[0]), TARGET.short),
    too_long=lambda: check_too_long(lambda: like().get_text_embedding(TARGET.long)),
    wrong_key=lambda: check_refused_key(lambda: like("wrong").get_query_embedding(TEXTS[0])),
)
run(
    "llama-index, TEI",
    one=lambda: check_vector(tei().get_query_embedding(TEXTS[0]), TARGET.vectors[0]),
    many=lambda: check_vectors(tei().get_text_embedding_batch(TEXTS)),
    rerank=rerank,
    too_long=cut,
    wrong_key=lambda: check_raises(lambda: tei("wrong").get_query_embedding(TEXTS[0]), "KeyError"),
)
