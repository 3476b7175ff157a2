"""/v1/embeddings of folders of sentence-transformers, with the vectors that the library gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.make import FOLDER
from tests.support.real_encoder import RealEncoder
from tests.support.rig import serving
from tests.support.sentence_cases import CASES, TEXTS, SentenceCase

pytestmark = pytest.mark.usefixtures("one_thread")
# The other cases differ from these in one word of a file, and are slow together.
QUICK = {
    "pool all by old switches",
    "normalised, dense, dense, normalised",
    "default prompt",
    "prompt left out, weightedmean",
    "longest text of the tokenizer",
    "truncated",
    "Qwen3-Embedding",
    "a decoder, cut, its prompt left out",
}


def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "sentences.json").read_text())
    return found


def case_of(case: SentenceCase) -> Any:
    marks = () if case.name in QUICK else (pytest.mark.slow,)
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", list(map(case_of, CASES)))
async def test_embeddings_of_a_folder_equal_those_of_the_library(
    case: SentenceCase, tmp_path: Path
) -> None:
    folder = case.write(tmp_path / "folder")
    # A causal language model without modules.json makes vectors only with the flag.
    is_bare_decoder = case.decoder == {} and case.pooling is None
    config = {"pooling": "last"} if is_bare_decoder else {}
    async with serving(RealEncoder(folder, **config), folder) as served:
        body = {"input": list(TEXTS), "truncate_prompt_tokens": -1, **case.encode}
        response = await served.http.post("/v1/embeddings", json=body)
        assert response.status_code == 200, response.text
        size = (await served.http.get("/v1/models")).json()["data"][0]["embedding_size"]
    found = np.array([entry["embedding"] for entry in response.json()["data"]])
    due = np.array(expected()[case.name])
    assert found.shape == due.shape == (len(TEXTS), size)
    assert np.abs(found - due).max() < 2e-6 * max(1, np.abs(due).max())


def test_cases_have_the_vectors_of_the_library_and_differ() -> None:
    vectors = expected()
    assert vectors.keys() == {case.name for case in CASES}
    assert len({json.dumps(found) for found in vectors.values()}) > len(CASES) - 8
