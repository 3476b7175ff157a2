"""Open WebUI's Ollama connection, as a user of its chat page in Chromium sees it."""

from __future__ import annotations

import base64
import shutil
import tempfile
from pathlib import Path
from typing import Any

from cells import QUESTION
from ollama_cells import MODEL, SEER, TARGET, TOO_HOT, run
from open_webui_page import ChatPage, add_model, browsing, squeezed, started

SETTINGS = {
    "ENABLE_OPENAI_API": "false",
    "ENABLE_OLLAMA_API": "true",
    "OLLAMA_BASE_URLS": f"{TARGET.url};{TARGET.seeing_url}",
    "ENABLE_TITLE_GENERATION": "false",
    "ENABLE_TAGS_GENERATION": "false",
    "ENABLE_FOLLOW_UP_GENERATION": "false",
}
PARAMS: dict[str, Any] = {"function_calling": "legacy", "temperature": 0, "max_tokens": 100}


def cells(page: ChatPage) -> dict[str, Any]:
    def models() -> None:
        """The list has the served model under its own name."""
        page.begin(MODEL)

    def chat() -> None:
        page.begin("whole")
        page.send(QUESTION)
        page.wait_answer("Paris")

    def stream() -> None:
        page.begin("streamed")
        page.send(QUESTION)
        page.wait_answer("Paris")
        page.send(QUESTION)
        page.wait_answer("Paris", turn=1)

    def image() -> None:
        page.begin("sees")
        page.upload("picture.png", base64.b64decode(TARGET.picture))
        page.send(TARGET.question)
        expected = squeezed(TARGET.seen)
        page.wait(lambda: squeezed(page.answer()) == expected, f"the answer {expected!r}")

    def refused() -> None:
        page.begin("hot")
        page.send(QUESTION)
        page.wait_answer("options.temperature")

    return {"models": models, "chat": chat, "stream": stream, "image": image, "refused": refused}


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="open-webui-"))
    try:
        with (
            started(folder, [], **SETTINGS) as url,
            browsing(url, TARGET.browser, folder) as page,
        ):
            add_model(url, "whole", MODEL, stream_response=False, **PARAMS)
            add_model(url, "streamed", MODEL, **PARAMS)
            add_model(url, "hot", MODEL, **PARAMS | {"temperature": TOO_HOT})
            add_model(url, "sees", SEER, **PARAMS | {"max_tokens": TARGET.seen_tokens})
            run("Open WebUI 0.12.4", **cells(page))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


main()
