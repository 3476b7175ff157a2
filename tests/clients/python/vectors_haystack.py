"""The cells of Haystack's embedders and rankers, by the packages of their APIs."""

from __future__ import annotations

from typing import Any

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret
from haystack_integrations.components.embedders.cohere import (
    CohereDocumentEmbedder,
    CohereTextEmbedder,
)
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)
from haystack_integrations.components.rankers.cohere import CohereRanker
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker
from vector_cells import (
    MODEL,
    RERANKER,
    TARGET,
    TEXTS,
    check_ranked_texts,
    check_refused_key,
    check_too_long,
    check_vector,
    check_vectors,
    run,
)

KEY, WRONG = Secret.from_token(TARGET.key), Secret.from_token("wrong")


def documents() -> list[Document]:
    return [Document(content=text) for text in TEXTS]


def check_documents(embedder: Any) -> None:
    found = embedder.run(documents())["documents"]
    check_vectors([document.embedding for document in found])


def check_rank(ranker: Any) -> None:
    found = ranker.run(TARGET.query, documents())["documents"]
    check_ranked_texts([(document.content, document.score) for document in found])


def openai(kind: Any, key: Secret = KEY, **fields: Any) -> Any:
    server = {"api_base_url": TARGET.base_url, "api_key": key, "max_retries": 0}
    return kind(model=MODEL, **server, **fields)


def cohere(kind: Any, key: Secret = KEY, **fields: Any) -> Any:
    return kind(model=MODEL, api_base_url=TARGET.url, api_key=key, **fields)


def tei(kind: Any, key: Secret = KEY, **fields: Any) -> Any:
    """The URL needs the path. By default the vectors are not normalised, and texts are cut."""
    fields = {"api_params": {"url": f"{TARGET.url}/embed"}, "normalize": True} | fields
    return kind(api_type="text_embeddings_inference", token=key, **fields)


def text_of(embedder: Any, text: str = TEXTS[0]) -> Any:
    return embedder.run(text)["embedding"]


run(
    "haystack, OpenAI",
    one=lambda: check_vector(text_of(openai(OpenAITextEmbedder)), TARGET.vectors[0]),
    many=lambda: check_documents(openai(OpenAIDocumentEmbedder)),
    dimensions=lambda: check_vector(
        text_of(openai(OpenAITextEmbedder, dimensions=8)), TARGET.short
    ),
    too_long=lambda: check_too_long(lambda: text_of(openai(OpenAITextEmbedder), TARGET.long)),
    wrong_key=lambda: check_refused_key(lambda: text_of(openai(OpenAITextEmbedder, WRONG))),
)
run(
    "haystack, Cohere",
    one=lambda: check_vector(text_of(cohere(CohereTextEmbedder)), TARGET.vectors[0]),
    many=lambda: check_documents(cohere(CohereDocumentEmbedder)),
    rerank=lambda: check_rank(
        CohereRanker(model=RERANKER, api_base_url=TARGET.rerank_url, api_key=KEY)
    ),
    too_long=lambda: check_too_long(
        lambda: text_of(cohere(CohereTextEmbedder, truncate="NONE"), TARGET.long)
    ),
    wrong_key=lambda: check_refused_key(lambda: text_of(cohere(CohereTextEmbedder, WRONG))),
)
run(
    "haystack, TEI",
    one=lambda: check_vector(text_of(tei(HuggingFaceAPITextEmbedder)), TARGET.vectors[0]),
    many=lambda: check_documents(tei(HuggingFaceAPIDocumentEmbedder)),
    rerank=lambda: check_rank(HuggingFaceTEIRanker(url=TARGET.rerank_url, token=KEY)),
    too_long=lambda: check_too_long(
        lambda: text_of(tei(HuggingFaceAPITextEmbedder, truncate=False), TARGET.long)
    ),
    wrong_key=lambda: check_refused_key(lambda: text_of(tei(HuggingFaceAPITextEmbedder, WRONG))),
)
