"""The cells of langchain-openai's OpenAIEmbeddings."""

from __future__ import annotations

import os
from typing import Any

from langchain_openai import OpenAIEmbeddings
from vector_cells import (
    MODEL,
    TARGET,
    TEXTS,
    check_raises,
    check_refused_key,
    check_too_long,
    check_vector,
    check_vectors,
    run,
)


def client(key: str = TARGET.key, *, ids: bool = False, **fields: Any) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(
        model=MODEL,
        base_url=TARGET.base_url,
        api_key=key,
        max_retries=0,
        check_embedding_ctx_length=ids,
        **fields,
    )


def many() -> None:
    check_vectors(client().embed_documents(TEXTS))
    check_vectors(client(chunk_size=2).embed_documents(TEXTS))


def token_ids() -> None:
    """By default it sends ids of OpenAI's cl100k. The error names the setting."""
    os.environ["TIKTOKEN_CACHE_DIR"] = TARGET.tiktoken
    sends_ids = client(ids=True)
    check_raises(
        lambda: sends_ids.embed_query(TEXTS[0]),
        "out of vocabulary",
        "check_embedding_ctx_length=False",
    )


run(
    "langchain-openai",
    one=lambda: check_vector(client().embed_query(TEXTS[0]), TARGET.vectors[0]),
    many=many,
    dimensions=lambda: check_vector(client(dimensions=8).embed_query(TEXTS[0]), TARGET.short),
    too_long=lambda: check_too_long(lambda: client().embed_query(TARGET.long)),
    wrong_key=lambda: check_refused_key(lambda: client("wrong").embed_documents(TEXTS)),
    token_ids=token_ids,
)
