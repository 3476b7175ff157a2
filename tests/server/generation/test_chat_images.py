"""Images in chats: read once, shown by the template, found among the prompt's tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.protocol.generate import Image
from server.images.shown import ImageTokens, ReadImage, ShownImages, image_parts, marked
from tests.server.conftest import EOS, byte_tokenizer
from tests.server.glassbox.explain.test_routes import answer_explain_requests
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, eventually, serving

PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}<assistant>"
)
TEXT_ONLY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
CAT = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
DOG = {"type": "image_url", "image_url": "data:image/png;base64,AAAB"}


class FakeReader:
    """Reads every image as three tokens in two runs; its digest is its URL's end."""

    def __init__(self, token_id: int) -> None:
        self.tokens = ImageTokens("<image>", "<image>", token_id)
        self.read_urls: list[str] = []
        self.pixels: list[bytes] = []

    async def read(self, messages: Sequence[dict[str, Any]], param: str) -> ShownImages:
        found = []
        for message in messages:
            for part in image_parts(message):
                self.read_urls.append(part["url"])
                pixels = bytes(bytearray(12))  # an object of its own
                self.pixels.append(pixels)
                image = Image(part["url"][-4:].encode(), (), pixels, (1, 2, 2))
                found.append(ReadImage(image, 3, "[<image><image>|<image>]"))
        return ShownImages([marked(each, self.tokens) for each in messages], found, self.tokens)


def write_model(folder: Path, template: str) -> Path:
    folder.mkdir()
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 257}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def engine() -> FakeEngine:
    engine = FakeEngine(lambda request: [72, EOS])
    engine.info = msgspec.structs.replace(engine.info, vocab_size=300)
    return engine


def with_reader(served: Served) -> FakeReader:
    state = served.app.state.penstock
    reader = FakeReader(state.tokenizer.token_id("<image>"))
    served.app.state.penstock = dataclasses.replace(
        state, read_images=reader.read, image_token=reader.tokens.token_id
    )
    return reader


@pytest.fixture(params=[PARTS, TEXT_ONLY], ids=["parts", "text only"])
async def seeing(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    """A server of a model that takes images, with a template that reads parts or texts alone."""
    model = write_model(tmp_path / "model", request.param)
    async with serving(engine(), model) as served:
        yield served


async def chat(served: Served, *content: Any, **fields: Any) -> Any:
    messages = [{"role": "user", "content": list(content)}]
    body = {"messages": messages, "max_tokens": 1} | fields
    return await served.http.post("/v1/chat/completions", json=body)


def text_of(served: Served) -> str:
    tokenizer = served.app.state.penstock.tokenizer
    prompt = served.engine.requests[-1].prompt
    return str(tokenizer.decode(prompt, skip_special_tokens=False))


async def test_images_are_shown_and_found_again(seeing: Served) -> None:
    reader = with_reader(seeing)
    says = {"type": "text", "text": "One:"}
    response = await chat(seeing, says, CAT, {"type": "text", "text": "two:"}, DOG)
    assert response.status_code == 200
    text = text_of(seeing)
    shown = "[<image><image>|<image>]"
    assert text.replace("\n", "").startswith(f"<user>One:{shown}two:{shown}<assistant>")
    request = seeing.engine.requests[-1]
    assert reader.read_urls == ["data:image/png;base64,AAAA", "data:image/png;base64,AAAB"]
    assert [image.digest for image in request.images] == [b"AAAA", b"AAAB"]
    image_token = seeing.app.state.penstock.tokenizer.token_id("<image>")
    for image in request.images:
        (first, two), (last, one) = image.runs
        assert (two, one, last) == (2, 1, first + 3)
        assert [request.prompt[at] for at in (first, first + 1, last)] == [image_token] * 3


async def test_marker_in_the_text_of_a_message_is_text(seeing: Served) -> None:
    with_reader(seeing)
    response = await chat(seeing, {"type": "text", "text": "a <image> tag"}, CAT)
    assert response.status_code == 200
    request = seeing.engine.requests[-1]
    image_token = seeing.app.state.penstock.tokenizer.token_id("<image>")
    assert request.prompt.count(image_token) == 3
    assert "a <image> tag" in text_of(seeing), "the model reads what the user wrote"
    response = await seeing.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "<image>"}]}
    )
    assert response.status_code == 200
    assert image_token not in seeing.engine.requests[-1].prompt


async def test_salt_keeps_encoded_images_apart(seeing: Served) -> None:
    with_reader(seeing)
    digests = []
    for salt in ("a", "b", "a"):
        await chat(seeing, CAT, cache_salt=salt)
        digests.append(seeing.engine.requests[-1].images[0].digest)
    assert digests[0] == digests[2] != digests[1]


async def test_render_and_token_counts_include_images(seeing: Served) -> None:
    with_reader(seeing)
    await chat(seeing, CAT)
    due = len(seeing.engine.requests[-1].prompt)
    body = {"messages": [{"role": "user", "content": [CAT]}]}
    rendered = (await seeing.http.post("/v1/chat/completions/render", json=body)).json()
    assert rendered["count"] == due
    tokens = (await seeing.http.post("/tokenize", json=body)).json()
    assert tokens["count"] == due
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    content = [{"type": "image", "source": source}]
    body = {"messages": [{"role": "user", "content": content}]}
    counted = await seeing.http.post("/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": due}
    content = [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]
    given = {"input": [{"role": "user", "content": content}]}
    counted = await seeing.http.post("/v1/responses/input_tokens", json=given)
    assert counted.json()["input_tokens"] == due


async def test_prompt_of_the_pages_has_places_of_images_and_no_warning(seeing: Served) -> None:
    with_reader(seeing)
    ui = {"x-penstock-ui": "1"}
    hello = (await seeing.http.get("/ui/api/hello", headers=ui)).json()
    assert hello["takes_images"]
    assert hello["max_body_bytes"] == seeing.app.state.penstock.config.max_body_bytes
    content = [{"type": "text", "text": "One:"}, CAT, DOG]
    body = {"messages": [{"role": "user", "content": content}]}
    answer = (await seeing.http.post("/ui/api/prompt", json=body, headers=ui)).json()
    token = seeing.app.state.penstock.tokenizer.token_id("<image>")
    for image in answer["images"]:
        places = [first + place for first, count in image["runs"] for place in range(count)]
        assert [answer["ids"][place] for place in places] == [token] * image["tokens"]
    assert [image["tokens"] for image in answer["images"]] == [3, 3]
    assert answer["images"][0]["runs"] != answer["images"][1]["runs"]
    assert "special_token_in_content" not in [each["code"] for each in answer["lint"]]
    assert "content_not_shown" not in [each["code"] for each in answer["lint"]]


async def test_answer_is_explained_with_its_images(seeing: Served) -> None:
    reader = with_reader(seeing)
    await chat(seeing, CAT)
    asked = seeing.engine.requests[-1]
    body = {"prompt_ids": asked.prompt, "answer_ids": [72, EOS]}
    ui = {"x-penstock-ui": "1"}
    refused = await seeing.http.post("/ui/api/explain", json=body, headers=ui)
    assert refused.status_code == 400
    assert "stands for an image" in refused.json()["error"]["message"]
    answer_explain_requests(seeing.engine)
    url = CAT["image_url"]["url"]
    explained = await seeing.http.post("/ui/api/explain", json=body | {"images": [url]}, headers=ui)
    assert explained.status_code == 200, explained.text
    assert reader.read_urls == [url, url]
    assert seeing.engine.requests[-1].images == asked.images
    wrong = await seeing.http.post(
        "/ui/api/explain", json=body | {"images": [url, url]}, headers=ui
    )
    assert wrong.status_code == 400
    assert "the images need 6" in wrong.json()["error"]["message"]


async def test_capabilities_say_whether_images_are_taken(seeing: Served) -> None:
    before = (await seeing.http.get("/capabilities")).json()
    assert (before["images"], before["model"]["capabilities"]) == (False, ["completion", "chat"])
    with_reader(seeing)
    after = (await seeing.http.get("/capabilities")).json()
    assert after["images"]
    assert after["model"]["capabilities"] == ["completion", "chat", "vision"]


async def test_images_of_other_apis_reach_the_engine(seeing: Served) -> None:
    reader = with_reader(seeing)
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    image = {"type": "image", "source": source}
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    messages = [
        {"role": "user", "content": [image, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    body = {"messages": messages, "max_tokens": 1}
    response = await seeing.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert len(seeing.engine.requests[-1].images) == 2
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAB"}
    items = [
        {"role": "user", "content": [picture]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [picture]},
    ]
    response = await seeing.http.post("/v1/responses", json={"input": items})
    assert response.status_code == 200, response.text
    assert len(seeing.engine.requests[-1].images) == 2
    assert reader.read_urls[0] == "data:;base64,AAAA"
    page = await seeing.http.get(f"/v1/responses/{response.json()['id']}/input_items")
    stored = [item["content"][0] for item in page.json()["data"] if item["type"] == "message"]
    assert stored == [{**picture, "detail": "auto"}]


async def test_image_tokens_without_an_image_are_refused(seeing: Served) -> None:
    with_reader(seeing)
    token = seeing.app.state.penstock.tokenizer.token_id("<image>")
    for prompt in ("an <image>", [1, token]):
        response = await seeing.http.post("/v1/completions", json={"prompt": prompt})
        assert response.status_code == 400
        assert "stands for an image" in response.json()["error"]["message"]


async def test_template_that_shows_no_images_is_named(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{% endfor %}"
    model = write_model(tmp_path / "model", template)
    async with serving(engine(), model) as served:
        with_reader(served)
        response = await chat(served, CAT)
        assert response.status_code == 400
        assert "shows 0 images; the messages have 1" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("tower", "lacks"),
    [
        ({"num_hidden_layers": 1}, "model.safetensors has no tensors of vision_tower"),
        (None, "config.json has no vision_config"),
    ],
)
async def test_model_without_its_tower_says_what_is_missing(
    tmp_path: Path, tower: dict[str, Any] | None, lacks: str
) -> None:
    model = write_model(tmp_path / "model", PARTS)
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "vision_config": tower,
        "eos_token_id": 257,
    }
    (model / "config.json").write_text(json.dumps(config))
    weights = {"language_model.model.norm.weight": np.ones(3, np.float32)}
    save_file(weights, model / "model.safetensors")
    async with serving(engine(), model) as served:
        response = await chat(served, CAT)
        assert response.status_code == 400
        said = f"This model takes no images because {lacks}; send text only."
        assert response.json()["error"]["message"] == f"messages: {said}"


async def test_text_model_refuses_images_of_users(seeing: Served) -> None:
    response = await chat(seeing, CAT)
    assert response.status_code == 400
    assert (
        response.json()["error"]["message"]
        == "messages: This model takes no images; send text only."
    )
    response = await seeing.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "system", "content": [CAT]}]}
    )
    assert response.json()["error"]["param"] == "messages.0.content.0.type"


@pytest.mark.parametrize("stream", [False, True])
async def test_pixels_are_dropped_once_they_are_sent(seeing: Served, stream: bool) -> None:
    """An answer of minutes must not hold the megabytes of its images."""
    reader = with_reader(seeing)
    seeing.engine.gate.clear()
    task = asyncio.create_task(chat(seeing, CAT, stream=stream, n=2))
    await eventually(lambda: len(seeing.engine.requests) == 2, "both choices are submitted")
    try:
        [pixels] = reader.pixels
        # The list, the variable, and the argument of the call.
        assert sys.getrefcount(pixels) == 3
    finally:
        seeing.engine.gate.set()
    assert (await task).status_code == 200


async def test_client_that_leaves_while_its_images_are_read_ends_the_reading(
    seeing: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = with_reader(seeing)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def read(messages: Any, param: str) -> ShownImages:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        raise AssertionError

    state = seeing.app.state.penstock
    seeing.app.state.penstock = dataclasses.replace(state, read_images=read)
    for send in (
        lambda: chat(seeing, CAT),
        lambda: seeing.http.post(
            "/tokenize", json={"messages": [{"role": "user", "content": [CAT]}]}
        ),
    ):
        begun.clear()
        ended.clear()
        task = asyncio.create_task(send())
        await asyncio.wait_for(begun.wait(), 20)
        task.cancel()
        await asyncio.wait_for(ended.wait(), 20)
    assert not seeing.engine.requests
    assert reader.read_urls == []
