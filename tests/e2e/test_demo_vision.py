"""demo-vision over HTTP: pictures that it has not seen, and the answers of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from PIL import Image, ImageDraw

from engine.checkpoint.folder import model_folder
from engine.offline.demo_training.evaluate import (
    Probe,
    judge,
    png_url,
    read_probes,
    request_fields,
)
from engine.offline.demo_training.vision_text import probe_picture
from tests.support import web
from tests.support.serve import Server, serving

MODEL = "demo-vision"
PROBES = read_probes(MODEL)
TOPICS = tuple(dict.fromkeys(probe["topic"] for probe in PROBES))
# Shares of right answers; docs/demo-vision.md has those that were measured.
FLOORS = {
    "shape": 0.92,
    "colour": 0.88,
    "count": 0.85,
    "digit": 0.92,
    "describe": 0.75,
    "new_pair": 0.88,
    "count_mixed": 0.7,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(MODEL) as running:
        yield running


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0) as client:
        yield client


def answer(sdk: openai.OpenAI, fields: dict[str, Any]) -> str:
    reply = sdk.chat.completions.create(model=MODEL, temperature=0, max_tokens=60, **fields)
    assert reply.choices[0].finish_reason == "stop"
    return reply.choices[0].message.content or ""


def score(sdk: openai.OpenAI, probes: list[Probe]) -> float:
    """Return the share of right answers."""
    right = [judge(probe, answer(sdk, request_fields(probe))) for probe in probes]
    return sum(right) / len(probes)


def test_vision_demo_answers_three_pictures_of_each_topic(sdk: openai.OpenAI) -> None:
    few = [probe for probe in PROBES if probe["picture"] % 25 < 3]
    assert len(few) == 3 * len(TOPICS)
    assert score(sdk, few) >= 0.85


@pytest.mark.slow
@pytest.mark.parametrize("topic", TOPICS)
def test_vision_demo_answers_most_probes_of_each_topic(sdk: openai.OpenAI, topic: str) -> None:
    asked = [probe for probe in PROBES if probe["topic"] == topic]
    assert score(sdk, asked) >= FLOORS[topic]


def test_vision_demo_looks_at_the_picture_that_was_sent(sdk: openai.OpenAI) -> None:
    """A picture drawn here, not by the training's code: its colour is what the answer names."""
    for colour, name in (("#ff0000", "red"), ("#0000ff", "blue"), ("#ffff00", "yellow")):
        picture = Image.new("RGB", (300, 200), "black")
        ImageDraw.Draw(picture).ellipse((90, 40, 210, 160), fill=colour)
        parts = [
            {"type": "text", "text": "Which colour is the circle?"},
            {"type": "image_url", "image_url": {"url": png_url(picture)}},
        ]
        assert name in answer(sdk, {"messages": [{"role": "user", "content": parts}]})


@pytest.mark.slow
def test_vision_demo_gives_the_answers_of_transformers() -> None:
    """Prompts and greedy answers in float32, with the processor that transformers finds."""
    transformers = pytest.importorskip("transformers")
    import torch

    folder = model_folder(MODEL)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    load = transformers.Idefics3ForConditionalGeneration.from_pretrained
    reference = load(folder, dtype=torch.float32).eval()
    probes = [probe for probe in PROBES if probe["picture"] % 25 < 4]
    with serving(MODEL, "--dtype", "float32") as server:
        for probe in probes:
            picture = probe_picture(probe["topic"], probe["picture"])
            (message,) = probe["messages"]
            parts = [{"type": "image"}, {"type": "text", "text": message["content"]}]
            text = processor.apply_chat_template(
                [{**message, "content": parts}], add_generation_prompt=True
            )
            inputs = processor(text=text, images=[picture], return_tensors="pt")
            with torch.inference_mode():
                out = reference.generate(**inputs, do_sample=False, max_new_tokens=40)
            prompt = inputs.input_ids[0].tolist()
            body = {"temperature": 0, "max_tokens": 40, "return_token_ids": True}
            url = f"{server.base_url}/v1/chat/completions"
            reply = web.post(url, json=body | request_fields(probe), timeout=60).json()
            assert reply["prompt_token_ids"] == prompt
            assert reply["choices"][0]["token_ids"] == out[0, len(prompt) :].tolist()
