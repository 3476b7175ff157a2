"""Open WebUI as a process with an empty data folder, and its chat page in Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

START_S = 180
STOP_S = 20
WAIT_S = 180  # for an answer; its prompt has 11,000 tokens
POLL_MS = 50


@dataclass(frozen=True)
class Connection:
    """A server that Open WebUI knows. Its models are named `prefix.name` if there is a prefix."""

    url: str
    key: str
    prefix: str = ""
    models: tuple[str, ...] = ()  # otherwise those that the server lists


def environment(folder: Path, connections: list[Connection]) -> dict[str, str]:
    """Return the settings: the connections, no account, and nothing of the network."""
    configs = {
        str(index): {"prefix_id": connection.prefix, "model_ids": list(connection.models)}
        for index, connection in enumerate(connections)
    }
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "DATA_DIR": str(folder / "data"),
        "WEBUI_SECRET_KEY": "secret",
        "WEBUI_AUTH": "False",
        "OFFLINE_MODE": "true",
        "HF_HUB_OFFLINE": "1",
        "RAG_EMBEDDING_MODEL": "",
        "ENABLE_OLLAMA_API": "false",
        "OPENAI_API_BASE_URLS": ";".join(f"{connection.url}/v1" for connection in connections),
        "OPENAI_API_KEYS": ";".join(connection.key for connection in connections),
        "OPENAI_API_CONFIGS": json.dumps(configs),
    }


def squeezed(text: str) -> str:
    """Return `text` with single spaces: a page joins lines."""
    return " ".join(text.split())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def sent(url: str, body: dict[str, Any], token: str = "") -> Any:
    """Send a request to Open WebUI's own API and return the answer."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


@contextlib.contextmanager
def started(folder: Path, connections: list[Connection], **settings: str) -> Iterator[str]:
    """Start Open WebUI and yield its URL when it is ready. Its log goes to stderr.

    `settings` are further variables of its environment.

    Raises AssertionError if it is not ready in time.
    """
    url = f"http://127.0.0.1:{free_port()}"
    command = [Path(sys.executable).parent / "open-webui", "serve", "--host", "127.0.0.1"]
    command += ["--port", url.rpartition(":")[2]]
    env = environment(folder, connections) | settings
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=sys.stderr)
    try:
        wait_ready(url, process)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=10):
            return
        time.sleep(0.5)
    raise AssertionError(f"Open WebUI did not become ready; its status is {process.poll()}")


def add_model(url: str, name: str, base: str, usage: bool = False, **params: object) -> None:
    """Add a model to Open WebUI's workspace: `base` with parameters of its own."""
    token = sent(f"{url}/api/v1/auths/signin", {"email": "", "password": ""})["token"]
    model = {
        "id": name,
        "name": name,
        "base_model_id": base,
        "meta": {"capabilities": {"usage": usage}},
        "params": params,
    }
    sent(f"{url}/api/v1/models/create", model, token)


class ChatPage:
    """The page of a new chat, and what a user does in it."""

    def __init__(self, page: Page, url: str) -> None:
        self._page = page
        self._url = url

    def begin(self, model: str) -> None:
        """Open a new chat and choose the model."""
        self._page.goto(self._url)
        notes = self._page.get_by_role("button", name="Okay, Let's Go!")
        self._page.locator("#chat-input").wait_for()
        if notes.is_visible():
            notes.click()
        self._page.locator("#model-selector-model-button").click()
        self._page.locator(f'[role=option][data-value="{model}"]').click()

    def upload(self, name: str, data: bytes) -> None:
        """Choose a file for the next message; wait until the page shows it as a picture."""
        shown = self._page.locator('#message-input-container img[data-cy="image"]')
        count = shown.count()
        upload = self._page.locator('input[type="file"]').first
        upload.set_input_files({"name": name, "mimeType": "image/png", "buffer": data})
        self.wait(lambda: shown.count() > count, "the picture above the message")

    def send(self, text: str) -> None:
        self._page.locator("#chat-input").fill(text)
        self._page.keyboard.press("Enter")

    def stop(self) -> None:
        self._page.get_by_role("button", name="Stop", exact=True).click()

    def wait(self, condition: Callable[[], Any], description: str) -> Any:
        """Poll `condition` while the page goes on, and return its first true value.

        Raises AssertionError, with the page's text, if that takes too long.
        """
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if value := condition():
                return value
            self._page.wait_for_timeout(POLL_MS)
        text = self._page.locator("body").inner_text()
        raise AssertionError(f"not within {WAIT_S} s: {description}. The page: {text[-500:]!r}")

    def answer(self, turn: int = 0) -> str:
        """Return the text of an answer so far, or the error in its place."""
        answers = self._page.locator("#response-content-container")
        if answers.count() <= turn:
            return ""
        return answers.nth(turn).inner_text()

    def wait_answer(self, text: str, turn: int = 0) -> None:
        """Wait until an answer, or the error in its place, contains `text`."""
        self.wait(lambda: text in self.answer(turn), f"{text!r} in answer {turn}")


@contextlib.contextmanager
def browsing(url: str, browser: str, folder: Path) -> Iterator[ChatPage]:
    """Start Chromium, at the path `browser`, with an empty profile; yield the chat page."""
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            folder / "profile",
            executable_path=browser,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield ChatPage(context.new_page(), url)
        context.close()
