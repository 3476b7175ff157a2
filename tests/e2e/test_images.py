"""Images over HTTP: the answers of transformers, and each image encoded once."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support import web
from tests.support.process import ROOT
from tests.support.serve import Server, serving
from tests.support.thorough import examples
from tests.support.tiny_smolvlm import Reference, noise, png_url, write_seeing

ANSWER = 8  # tokens
SIZES = ((24, 24), (100, 61), (61, 100), (300, 40), (25, 24), (1, 1), (72, 72), (500, 499))


@dataclass(frozen=True)
class Question:
    """A chat, as the reference and as OpenAI's API have it."""

    messages: list[dict[str, Any]]
    pictures: list[Image.Image]
    body: dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("seeing") / "smolvlm")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """A small cache, so that prompts are cut in images, preempted and evicted."""
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "50", "--max-num-seqs", "6")
    with serving(folder, *flags, "--num-gpu-blocks-override", "60") as running:
        yield running


def question(rng: random.Random, shelf: list[Image.Image]) -> Question:
    """Return a question about none, one or a few of the pictures of a shelf."""
    pictures = rng.choices(shelf, k=rng.choice((0, 1, 1, 1, 2, 3)))
    parts: list[dict[str, Any]] = [{"type": "text", "text": rng.choice(("What", "Hi", "A"))}]
    sent = [*parts]
    for picture in pictures:
        parts.append({"type": "image"})
        sent.append({"type": "image_url", "image_url": {"url": png_url(picture)}})
    tail = {"type": "text", "text": rng.choice((" is it?", " now", ""))}
    messages = [{"role": "user", "content": [*parts, tail]}]
    body = {
        "messages": [{"role": "user", "content": [*sent, tail]}],
        "max_tokens": ANSWER,
        "temperature": 0,
        "return_token_ids": True,
    }
    return Question(messages, pictures, body)


async def ask(server: Server, questions: list[Question]) -> list[dict[str, Any]]:
    limit = asyncio.Semaphore(12)
    async with server.http() as http:

        async def one(asked: Question) -> dict[str, Any]:
            async with limit:
                response = await http.post("/v1/chat/completions", json=asked.body)
            assert response.status_code == 200, response.text
            found: dict[str, Any] = response.json()
            return found

        return await asyncio.gather(*(one(asked) for asked in questions))


@pytest.mark.timeout(600)  # the reference answers 200 questions in `make test-slow`
async def test_mixed_text_and_images_get_the_answers_of_transformers(
    server: Server, reference: Reference
) -> None:
    rng = random.Random(63)
    shelf = [noise(rng, width, height) for width, height in SIZES]
    questions = [question(rng, shelf) for _ in range(examples(200))]
    answers = await ask(server, questions)
    for asked, answer in zip(questions, answers, strict=True):
        prompt, due = reference.answer(asked.messages, asked.pictures, ANSWER)
        assert answer["prompt_token_ids"] == prompt
        assert answer["choices"][0]["token_ids"] == due
    server.wait_idle()
    assert server.metric("images_encoded") == len(shelf), "each picture once"


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


DOT = png_url(noise(random.Random(2), 3, 3))  # 90 tokens, as any square
CONTEXT = "This model's maximum context length is 1024 tokens, but "
SOME = "This server fetches no images from addresses. Send the image as a data: URL"


@pytest.mark.parametrize(
    ("text", "urls", "code", "message"),
    [
        ("", [DOT] * 101, "invalid_value", "The request has 101 images; the limit is 100."),
        (
            "",
            [DOT] * 20,
            "context_length_exceeded",
            "first 12 of the 20 images alone have 1080",
        ),
        ("x" * 900, [DOT], "context_length_exceeded", "alone has 1032, 90 of them for images."),
        ("x" * 9000, [DOT], "context_length_exceeded", "90 of them for images."),
        ("", ["https://a.example/b.png"], "invalid_value", SOME),
        ("", [DOT, "https://a.example/b.png"], "invalid_value", f"Image 2 of 2: {SOME}"),
        ("", ["cat.png"], "invalid_value", "'cat.png' is neither a data: URL nor base64. Paths"),
        ("", ["file:///cat.png"], "unsupported_parameter", "file: is not supported; send a data:"),
        ("", [url_of(b"II*\0")], "invalid_value", "a TIFF image, which is not supported. Send a"),
    ],
)
def test_error_about_images_says_what_to_change(
    server: Server, text: str, urls: list[str], code: str, message: str
) -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    response = web.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == code
    assert message in error["message"]
    assert (code == "context_length_exceeded") == error["message"].startswith(CONTEXT)


def test_requests_of_the_page_are_answered(server: Server, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "images.md").read_text("utf-8")
    noise(random.Random(3), 90, 60).save(tmp_path / "cat.png")
    answers = []
    for script in re.findall(r"```bash\n(printf.+?)```", page, re.S):
        script = script.replace("curl", "curl -s --fail-with-body")
        script = script.replace("http://127.0.0.1:8000", server.base_url)
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout
        answers.append(json.loads(done.stdout)["usage"])
    chat, response, message = answers
    read = message["input_tokens"] + message["cache_read_input_tokens"]
    assert chat["prompt_tokens"] == response["input_tokens"] == read > 90


async def test_same_image_is_encoded_once_and_another_is_a_miss(server: Server) -> None:
    rng = random.Random(1)
    first, second = noise(rng, 90, 60), noise(rng, 90, 60)
    before = server.metric("images_encoded")

    def about(picture: Image.Image) -> Question:
        content = [
            {"type": "text", "text": "Tell me about this picture, please: "},
            {"type": "image_url", "image_url": {"url": png_url(picture)}},
        ]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
        return Question([], [], body | {"temperature": 0, "return_token_ids": True})

    answers = []
    for picture in (first, first, second, first):
        answers += await ask(server, [about(picture)])
    ids = [answer["choices"][0]["token_ids"] for answer in answers]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert ids[0] == ids[1] == ids[3] != ids[2]
    assert server.metric("images_encoded") - before == 2
    assert cached[1] > 60 > cached[2], "only the text before the other picture is shared"
