"""Other people's clients, unchanged, send images to a real server: a table of what they can do.

A runner per environment asks about pictures with one client or several. Each cell compares the
answer with that of plain HTTP.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import (
    HERE,
    IMAGES,
    IMAGES_NODE,
    chromium,
    images_python_of,
    images_script_of,
    python_of,
)
from tests.clients.reports import Cell, rendered, run_script
from tests.support import web
from tests.support.serve import Server, serving
from tests.support.tiny_smolvlm import noise, png_url, write_seeing

# The first run installs the clients.
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

MODEL = "seer"
QUESTION = "What are these?"
TOKENS = 12  # of an answer
CELLS = ("one", "file part", "stream", "several", "tool result", "count", "no image")


def ask(server: Server, urls: list[str]) -> Any:
    parts: list[Any] = [{"type": "text", "text": QUESTION}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": TOKENS}
    response = web.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_seeing(tmp_path_factory.mktemp("seeing") / "model")
    # The likeliest tokens, because some of the clients send no temperature.
    greedy = json.loads((folder / "generation_config.json").read_text()) | {"top_k": 1}
    (folder / "generation_config.json").write_text(json.dumps(greedy))
    with serving(folder, "--dtype", "float32", "--served-model-name", MODEL) as running:
        yield running


@pytest.fixture(scope="module")
def target(server: Server) -> dict[str, Any]:
    """The Target of the runners."""
    rng = random.Random(63)
    urls = [png_url(noise(rng, 90, 60)), png_url(noise(rng, 50, 70))]
    answers = [ask(server, urls[:1]), ask(server, urls)]
    one, several = (answer["choices"][0]["message"]["content"] for answer in answers)
    other = ask(server, urls[1:])["choices"][0]["message"]["content"]
    assert len({one, several, other}) == 3, "the answers tell the pictures apart"
    return {
        "url": server.base_url,
        "question": QUESTION,
        "pictures": [url.partition(",")[2] for url in urls],
        "one": one,
        "several": several,
        "tokens": [answer["usage"]["prompt_tokens"] for answer in answers],
    }


@pytest.fixture(scope="module")
def table() -> Iterator[list[Cell]]:
    """The cells of all clients, printed at the end."""
    table: list[Cell] = []
    yield table
    print("\n\n" + rendered(table, CELLS))


@pytest.mark.parametrize("name", IMAGES)
def test_client_shows_images_and_gets_the_answers_of_plain_http(
    name: str, target: dict[str, Any], table: list[Cell]
) -> None:
    command: list[str | Path] = [images_python_of(name), HERE / "python" / f"images_{name}.py"]
    run_script(command, target, CELLS, table)


@pytest.mark.parametrize("name", IMAGES_NODE)
def test_node_client_shows_images_and_gets_the_answers_of_plain_http(
    name: str, target: dict[str, Any], table: list[Cell]
) -> None:
    if not shutil.which("npm"):
        pytest.skip("needs node and npm")
    run_script(["node", images_script_of(name)], target, CELLS, table)


def test_open_webui_in_a_browser_uploads_images_and_gets_the_answers_of_plain_http(
    target: dict[str, Any], table: list[Cell]
) -> None:
    browser = chromium()
    if browser is None:
        pytest.skip("needs Chromium")
    script = HERE / "python" / "images_open_webui.py"
    more = {**target, "browser": browser}
    run_script([python_of("open_webui"), script], more, CELLS, table)
