"""The cells of huggingface_hub's InferenceClient."""

from __future__ import annotations

from typing import Any

from huggingface_hub import InferenceClient
from vector_cells import (
    TARGET,
    TEXTS,
    check_raises,
    check_refused_key,
    check_too_long,
    check_vector,
    check_vectors,
    run,
)


def extract(
    given: Any, key: str = TARGET.key, url: str = f"{TARGET.url}/embed", **fields: Any
) -> Any:
    return InferenceClient(model=url, token=key).feature_extraction(given, **fields)


def one() -> None:
    check_vector(extract(TEXTS[0])[0], TARGET.vectors[0])
    # It posts to the URL itself.
    check_raises(lambda: extract(TEXTS[0], url=TARGET.url), "needs the path of a route", "/embed")


def too_long() -> None:
    check_too_long(lambda: extract(TARGET.long))
    for side in ("left", "right"):
        fields = {"truncate": True, "truncation_direction": side}
        assert extract(TARGET.long, **fields).shape == (1, len(TARGET.vectors[0]))


run(
    "huggingface_hub",
    one=one,
    many=lambda: check_vectors(extract(TEXTS, normalize=True)),
    too_long=too_long,
    wrong_key=lambda: check_refused_key(lambda: extract(TEXTS, "wrong")),
)
