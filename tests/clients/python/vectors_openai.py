"""The cells of openai's client with an encoder."""

from __future__ import annotations

import base64
import struct
from typing import Any

from openai import OpenAI
from vector_cells import (
    MODEL,
    TARGET,
    TEXTS,
    check_refused_key,
    check_too_long,
    check_vector,
    check_vectors,
    run,
)


def client(key: str = TARGET.key) -> OpenAI:
    return OpenAI(base_url=TARGET.base_url, api_key=key, max_retries=0)


def create(given: Any, key: str = TARGET.key, **fields: Any) -> list[Any]:
    answer = client(key).embeddings.create(model=MODEL, input=given, **fields)
    return [entry.embedding for entry in answer.data]


def many() -> None:
    check_vectors(create(TEXTS))  # base64, which the client decodes
    check_vectors(create(TEXTS, encoding_format="float"))
    [text] = create(TEXTS[0], encoding_format="base64")
    raw = base64.b64decode(text)
    check_vector(struct.unpack(f"<{len(raw) // 4}f", raw), TARGET.vectors[0])


run(
    "openai",
    one=lambda: check_vector(create(TEXTS[0])[0], TARGET.vectors[0]),
    many=many,
    dimensions=lambda: check_vector(create(TEXTS[0], dimensions=8)[0], TARGET.short),
    too_long=lambda: check_too_long(lambda: create(TARGET.long)),
    wrong_key=lambda: check_refused_key(lambda: create(TEXTS, "wrong")),
)
