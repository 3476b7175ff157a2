"""/v1/score and /v1/rerank of cross-encoders, with the scores that sentence-transformers gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.make import FOLDER
from tests.support.cross_encoder_cases import CASES, PAIRS, CrossEncoderCase
from tests.support.real_encoder import RealEncoder
from tests.support.rig import serving

pytestmark = pytest.mark.usefixtures("one_thread")
# The other cases differ from these in one word of a file, and are slow together.
QUICK = {"bert", "roberta", "modernbert", "softmax", "own settings first", "prompt"}
EQUAL = 1e-5  # of logits that are about 1


def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "cross_encoders.json").read_text())
    return found


def case_of(case: CrossEncoderCase) -> Any:
    marks = () if case.name in QUICK else (pytest.mark.slow,)
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", list(map(case_of, CASES)))
async def test_scores_of_a_folder_equal_those_of_the_library(
    case: CrossEncoderCase, tmp_path: Path
) -> None:
    folder = case.write(tmp_path / "folder")
    due = np.array(expected()[case.name])
    sides = {
        "text_1": [first for first, _ in PAIRS],
        "text_2": [second for _, second in PAIRS],
        "truncate_prompt_tokens": -1,
    }
    async with serving(RealEncoder(folder), folder) as served:
        response = await served.http.post("/v1/score", json=sides)
        if case.labels > 1:
            assert response.status_code == 400
            return
        assert response.status_code == 200, response.text
        found = [entry["score"] for entry in response.json()["data"]]
        assert np.abs(np.array(found) - due[:, 0]).max() < EQUAL
        query = PAIRS[0][0]
        body = {
            "query": query,
            "documents": [PAIRS[1][1], PAIRS[0][1]],
            "truncate_prompt_tokens": -1,
        }
        ranked = (await served.http.post("/v1/rerank", json=body)).json()["results"]
    scores = due[[1, 0], 0]
    assert [entry["index"] for entry in ranked] == (-scores).argsort().tolist()
    assert [entry["relevance_score"] for entry in ranked] == pytest.approx(
        sorted(scores, reverse=True), abs=EQUAL
    )


def test_cases_have_the_scores_of_the_library_and_differ() -> None:
    scores = expected()
    assert scores.keys() == {case.name for case in CASES}
    assert len({json.dumps(found) for found in scores.values()}) > len(CASES) // 2
