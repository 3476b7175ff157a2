"""Cross-encoders over HTTP, with the scores that sentence-transformers gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.make import FOLDER
from tests.support.cross_encoder_cases import CASES, PAIRS, CrossEncoderCase
from tests.support.real_encoder import RealEncoder
from tests.support.rig import Served, serving

pytestmark = pytest.mark.usefixtures("one_thread")
# The other cases differ from these in one word of a file, and are slow together.
QUICK = {"bert", "roberta", "softmax", "own settings first"}
EQUAL = 1e-5  # of logits that are about 1


def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "cross_encoders.json").read_text())
    return found


def case_of(case: CrossEncoderCase) -> Any:
    marks = () if case.name in QUICK else (pytest.mark.slow,)
    return pytest.param(case, id=case.name, marks=marks)


async def post(served: Served, path: str, **body: Any) -> Any:
    response = await served.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("case", [case_of(case) for case in CASES if case.labels == 1])
async def test_scores_of_a_folder_equal_those_of_the_library(
    case: CrossEncoderCase, tmp_path: Path
) -> None:
    folder = case.write(tmp_path / "folder")
    due = np.array(expected()[case.name])[:, 0]
    cut = {} if case.name.startswith("chat") else {"truncate_prompt_tokens": -1}
    async with serving(RealEncoder(folder, **case.flags), folder, **case.flags) as served:
        first, second = zip(*PAIRS, strict=True)
        answer = await post(served, "/v1/score", text_1=first, text_2=second, **cut)
        scores = [entry["score"] for entry in answer["data"]]
        documents = [PAIRS[1][1], PAIRS[0][1]]
        body = {"query": PAIRS[0][0], "documents": documents}
        ranked = (await post(served, "/v1/rerank", **body, **cut))["results"]
    assert np.abs(np.array(scores) - due).max() < EQUAL
    both = due[[1, 0]]
    assert [entry["index"] for entry in ranked] == (-both).argsort().tolist()
    found = [entry["relevance_score"] for entry in ranked]
    assert found == pytest.approx(sorted(both, reverse=True), abs=EQUAL)


@pytest.mark.parametrize("case", [case_of(case) for case in CASES if case.labels > 1])
async def test_labels_of_pairs_equal_those_of_the_library(
    case: CrossEncoderCase, tmp_path: Path
) -> None:
    folder = case.write(tmp_path / "folder")
    due = np.array(expected()[case.name])
    async with serving(RealEncoder(folder), folder) as served:
        is_raw = case.name == "three labels"  # no file names an activation
        first, second = zip(*PAIRS, strict=True)
        body = {"text_1": first, "text_2": second, "truncate_prompt_tokens": -1}
        answer = await post(served, "/v1/classify", **body, use_activation=not is_raw)
    found = np.array([entry["probs"] for entry in answer["data"]])
    assert np.abs(found - due).max() < EQUAL
    names = [f"LABEL_{n}" for n in due.argmax(1)]
    assert [entry["label"] for entry in answer["data"]] == names


def test_cases_have_the_scores_of_the_library_and_differ() -> None:
    scores = expected()
    assert scores.keys() == {case.name for case in CASES}
    assert len({json.dumps(found) for found in scores.values()}) > len(CASES) // 2
