"""/info of text-embeddings-inference: the kind of the model and its limits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.fake_encoder import FakeEncoder
from tests.support.fake_engine import FakeEngine
from tests.support.rig import serving
from tests.support.sentence_folder import sentence_folder


@pytest.mark.parametrize(
    ("pooling", "name"),
    [("mean", "mean"), ("lasttoken", "last_token"), (["cls", "max"], "cls+max")],
)
async def test_info_of_a_sentence_encoder_has_its_pooling_and_limits(
    model: Path, tmp_path: Path, pooling: str, name: str
) -> None:
    folder = sentence_folder(model, tmp_path / "folder", {"pooling_mode": pooling})
    async with serving(FakeEncoder(lambda request: []), folder) as served:
        found = (await served.http.get("/info")).json()
        card = (await served.http.get("/v1/models")).json()["data"][0]
    assert found["model_type"] == {"embedding": {"pooling": name}}
    assert found["max_input_length"] == card["max_model_len"]
    assert found["model_id"] == card["id"]
    assert found["model_dtype"] == card["dtype"]
    assert found["max_client_batch_size"] == 2048
    assert found["auto_truncate"] is False


@pytest.mark.parametrize(
    ("labels", "kind"), [(["LABEL_0"], "reranker"), (["no", "yes"], "classifier")]
)
async def test_info_of_a_model_with_a_head_has_its_labels(
    model: Path, tmp_path: Path, labels: list[str], kind: str
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    names = {str(index): label for index, label in enumerate(labels)}
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": names}
    (folder / "config.json").write_text(json.dumps(config))
    limits = {"tokenizer_class": "BertTokenizer", "chat_template": None}
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens | limits))
    engine = FakeEncoder(lambda request: [], labels=len(labels))
    async with serving(engine, folder) as served:
        found = (await served.http.get("/info")).json()["model_type"]
    ids = {label: index for index, label in enumerate(labels)}
    assert found == {kind: {"id2label": names, "label2id": ids}}


async def test_info_of_a_model_that_generates_is_refused(model: Path) -> None:
    async with serving(FakeEngine(lambda request: []), model) as served:
        response = await served.http.get("/info")
        assert response.status_code == 400
        assert "generates text" in response.json()["error"]["message"]
