"""Clients of Ollama, unchanged, with real servers: a table of what they can do.

A runner per environment calls the demo model, a tiny model that sees, and a tiny encoder. Cells of
pictures and vectors compare the result with that of plain HTTP.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agents import PROXIES, environment, refusing_proxy
from tests.clients.environments import (
    HERE,
    OLLAMA,
    commands_of,
    ollama_python_of,
    ollama_script,
    python_of,
)
from tests.clients.reports import Cell, rendered, run_script
from tests.clients.test_encoder_clients import TEXTS, write_encoder
from tests.support import web
from tests.support.scripted_serve import MODEL, call, serving_script
from tests.support.serve import Server, serving
from tests.support.tiny_smolvlm import noise, png_url, write_seeing

# The first run installs the clients.
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

CELLS = (
    *("models", "chat", "stream", "tools", "format"),
    *("image", "embed", "refused", "decisions"),
)
QUESTION = "What are these?"
TOKENS = 12  # of an answer about a picture


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("demo") as running:
        yield running


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_seeing(tmp_path_factory.mktemp("seeing") / "model")
    with serving(folder, "--dtype", "float32", "--served-model-name", "seer") as running:
        yield running


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_encoder(tmp_path_factory.mktemp("encoder"))
    with serving(folder, "--served-model-name", "minilm") as running:
        yield running


def post(server: Server, path: str, **body: Any) -> Any:
    response = web.post(f"{server.base_url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def seen(seer: Server, url: str, question: str) -> str:
    """Return what the model answers about a picture."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": parts}]
    body = {"messages": messages, "temperature": 0, "max_tokens": TOKENS}
    answer = post(seer, "/v1/chat/completions", **body)
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def target(server: Server, seer: Server, encoder: Server) -> dict[str, Any]:
    """The Target of the runners."""
    url = png_url(noise(random.Random(5), 60, 40))
    [vector] = post(encoder, "/v1/embeddings", input=TEXTS[0])["data"]
    return {
        "url": server.base_url,
        "seeing_url": seer.base_url,
        "encoder_url": encoder.base_url,
        "picture": url.partition(",")[2],
        "question": QUESTION,
        "seen": seen(seer, url, QUESTION),
        "seen_below_break": seen(seer, url, f"\n{QUESTION}"),
        "seen_tokens": TOKENS,
        "text": TEXTS[0],
        "vector": vector["embedding"],
    }


@pytest.fixture(scope="module")
def table() -> Iterator[list[Cell]]:
    """The cells of all clients, printed at the end."""
    table: list[Cell] = []
    yield table
    print("\n\n" + rendered(table, CELLS))


@pytest.mark.parametrize("name", OLLAMA)
def test_client_of_ollama_passes_each_cell(
    name: str, target: dict[str, Any], table: list[Cell]
) -> None:
    script = HERE / "python" / f"ollama_{name}.py"
    run_script([ollama_python_of(name), script], target, CELLS, table)


def test_client_of_ollama_for_javascript_passes_each_cell(
    target: dict[str, Any], table: list[Cell]
) -> None:
    if not shutil.which("npm"):
        pytest.skip("needs node and npm")
    run_script(["node", ollama_script()], target, CELLS, table)


def test_open_webui_in_a_browser_uses_its_ollama_connection(
    target: dict[str, Any], table: list[Cell]
) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("needs Chromium")
    script = HERE / "python" / "ollama_open_webui.py"
    run_script([python_of("open_webui"), script], {**target, "browser": browser}, CELLS, table)


def test_continue_with_its_ollama_provider_answers(server: Server, tmp_path: Path) -> None:
    """Its command sends /v1/chat/completions to the address of Ollama."""
    if not shutil.which("npm"):
        pytest.skip("needs node and npm")
    options = {"maxTokens": 100, "temperature": 0}
    model = {"name": "demo", "model": "demo", "provider": "ollama", "apiBase": server.base_url}
    models = [{**model, "roles": ["chat"], "defaultCompletionOptions": options}]
    config = {"name": "Penstock", "version": "1.0.0", "schema": "v1", "models": models}
    (tmp_path / "config.yaml").write_text(json.dumps(config))  # JSON is YAML, too
    commands = commands_of("cn")
    environment = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "CONTINUE_GLOBAL_DIR": str(tmp_path / "continue"),
        "CONTINUE_METRICS_ENABLED": "0",
    }
    command = [commands / "cn", "-p", "What is the capital of France?", "--auto"]
    done = subprocess.run(
        [*command, "--config", tmp_path / "config.yaml"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "Paris" in done.stdout, done.stdout + done.stderr


def test_codex_with_oss_finds_the_model_and_changes_a_file(tmp_path: Path) -> None:
    """It asks for /api/version and /api/tags, and then sends /v1/responses."""
    if not shutil.which("npm"):
        pytest.skip("needs node and npm")
    for name in ("home", "project"):
        (tmp_path / name).mkdir()
    file = tmp_path / "project" / "greeting"
    file.write_text("Helo\n")
    turns = [call("exec_command", cmd="sed -i s/Helo/Hello/ greeting"), "It is correct now."]
    with serving_script(tmp_path, turns) as server, refusing_proxy() as proxy:
        proxies = {**dict.fromkeys(PROXIES, proxy.url), "NO_PROXY": "127.0.0.1"}
        address = {"CODEX_OSS_BASE_URL": f"{server.base_url}/v1"}
        oss = ["--oss", "--local-provider", "ollama", "--model", MODEL]
        done = subprocess.run(
            [
                "codex",
                "exec",
                *oss,
                "--skip-git-repo-check",
                "--sandbox",
                "danger-full-access",
                "Go",
            ],
            env=environment("codex", tmp_path, proxies) | address,
            cwd=file.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        log = server.log
    assert done.returncode == 0, done.stderr
    assert file.read_text() == "Hello\n", done.stderr
    assert "It is correct now." in done.stdout
    for path in ("/api/version", "/api/tags", "/v1/responses"):
        assert f'"path": "{path}"' in log
    assert "/api/pull" not in log
