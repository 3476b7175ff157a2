"""GET /ui/api/hello: sampling values, first prompts and formats for the pages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from engine.protocol.structure import ModelStructure
from server.glassbox.model.structure import StructureReader
from tests.support.fake_encoder import FakeEncoder
from tests.support.fake_engine import INFO, FakeEngine, Script
from tests.support.rig import Served, serving

UI = {"x-penstock-ui": "1"}
OWN = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}


async def hello_of(served: Served) -> dict[str, Any]:
    response = await served.http.get("/ui/api/hello", headers=UI)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A copy of the model, so that tests can change it."""
    return Path(shutil.copytree(model, tmp_path / "copy"))


def change(file: Path, **fields: Any) -> None:
    before = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(before | fields))


async def test_hello_has_own_values_for_what_the_model_does_not_give(
    folder: Path, says: Callable[[str], Script]
) -> None:
    for name in ("temperature", "top_p", "min_p"):
        change(folder / "generation_config.json", **{name: None})
    async with serving(FakeEngine(says("Hi")), folder) as served:
        assert (await hello_of(served))["model"]["client_sampling"] == OWN
    change(folder / "generation_config.json", top_p=0.5)
    engine = FakeEngine(says("Hi"))
    async with serving(engine, folder) as served:
        hello = await hello_of(served)
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 200
    assert hello["model"]["client_sampling"] == {"temperature": 0.7, "min_p": 0.05}
    assert hello["defaults"]["top_p"] == 0.5
    params = engine.requests[-1].params
    assert (params.temperature, params.top_p, params.min_p) == (1, 0.5, 0), "the API stays at 1"


async def test_encoder_has_no_sampling_values(model: Path) -> None:
    async with serving(FakeEncoder(lambda request: []), model) as served:
        [listed] = (await served.http.get("/v1/models")).json()["data"]
    assert listed["client_sampling"] == {}


async def test_starters_are_those_of_the_models_folder(
    folder: Path, says: Callable[[str], Script]
) -> None:
    change(folder / "starters.json", prompts=["Spell garden.", 5, "Sing!"])
    async with serving(FakeEngine(says("Hi")), folder) as served:
        prompts = [one["prompt"] for one in (await hello_of(served))["starters"]]
    assert prompts[:2] == ["Spell garden.", "Sing!"]


@pytest.mark.parametrize("content", ["{", "[]", '{"prompts": "no list"}'])
async def test_damaged_file_of_starters_is_ignored(
    folder: Path, says: Callable[[str], Script], content: str
) -> None:
    (folder / "starters.json").write_text(content)
    async with serving(FakeEngine(says("Hi")), folder) as served:
        assert (await hello_of(served))["starters"]


async def test_starters_without_a_file_follow_the_template(
    folder: Path, says: Callable[[str], Script]
) -> None:
    async with serving(FakeEngine(says("Hi")), folder) as served:
        chat = (await hello_of(served))["starters"]
    assert chat[0] == {"prompt": "What is the capital of France?"}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tools = "{% for t in tools %}{{ t | tojson }}<tool_call>{% endfor %}"
    settings = folder / "tokenizer_config.json"
    change(
        settings,
        chat_template=[
            {"name": "default", "template": template},
            {"name": "tool_use", "template": template + tools},
        ],
    )
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    async with serving(FakeEngine(says("Hi")), folder) as served:
        assert (await hello_of(served))["starters"][-1]["tools"][0]["type"] == "function"
    change(settings, chat_template=None)
    async with serving(FakeEngine(says("Hi")), folder) as served:
        hello = await hello_of(served)
    assert not hello["has_template"]
    assert hello["starters"][0] == {"prompt": "The capital of France is"}


@pytest.mark.parametrize("path", ["hello", "model"])
async def test_formats_count_the_parts_that_the_engine_names(
    path: str, folder: Path, says: Callable[[str], Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has no list of the parts of a quantised weight."""

    async def no_boxes(*given: Any, **more: Any) -> ModelStructure:
        return ModelStructure()

    monkeypatch.setattr(StructureReader, "read", no_boxes)
    tensors = {"up.codes": torch.zeros(8, dtype=torch.int8), "up.steps": torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors")
    change(folder / "config.json", quantization_config={"quant_method": "row8"})
    info = replace(INFO, weight_parts=(".codes", ".steps"))
    async with serving(FakeEngine(says("Hi"), info=info), folder) as served:
        response = await served.http.get(f"/ui/api/{path}", headers=UI)
    assert response.json()["formats"] == [{"name": "row8 int8", "tensors": 1, "nbytes": 16}]
