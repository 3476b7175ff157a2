"""Images of Open WebUI: a user uploads pictures in its chat page, in Chromium."""

from __future__ import annotations

import base64
import shutil
import tempfile
from pathlib import Path
from typing import Any

from image_cells import MODEL, NO_IMAGE, REASON, TARGET, TOKENS, check_one, check_several, run
from open_webui_page import ChatPage, Connection, add_model, browsing, squeezed, started
from recorder import Exchange, Recorder

# Their prompts are longer than the context of the tiny model.
NO_TASKS = {
    "ENABLE_TITLE_GENERATION": "false",
    "ENABLE_TAGS_GENERATION": "false",
    "ENABLE_FOLLOW_UP_GENERATION": "false",
}
PARAMS: dict[str, Any] = {"function_calling": "legacy", "max_tokens": TOKENS}  # without its tools
RECORDER = Recorder(TARGET.url)


def asked(page: ChatPage, pictures: list[bytes], turn: int = 0) -> Exchange:
    """Upload pictures and ask; wait until the page shows the recorded answer."""
    for number, picture in enumerate(pictures):
        page.upload(f"picture{number}.png", picture)
    since = len(RECORDER.exchanges)
    page.send(TARGET.question)
    page.wait(lambda: [x for x in RECORDER.exchanges[since:] if x.is_complete], "an answer")
    [exchange] = RECORDER.exchanges[since:]
    assert exchange.status == 200, exchange.answer
    expected = squeezed(exchange.text)
    page.wait(lambda: squeezed(page.answer(turn)) == expected, f"the answer {expected!r}")
    return exchange


def images_of(exchange: Exchange) -> list[list[bytes]]:
    """Return the files of the pictures in each of the user's messages."""
    found = []
    for message in exchange.body["messages"]:
        if message["role"] == "user":
            parts = [part for part in message["content"] if part["type"] == "image_url"]
            urls = [part["image_url"]["url"] for part in parts]
            found.append([base64.b64decode(url.partition(";base64,")[2]) for url in urls])
    return found


def cells(page: ChatPage) -> dict[str, Any]:
    def one() -> None:
        page.begin("whole")
        exchange = asked(page, TARGET.bytes[:1])
        assert not exchange.body["stream"]
        assert images_of(exchange) == [TARGET.bytes[:1]]
        check_one(exchange.text)

    def stream() -> None:
        """Two turns: the second sends the picture of the first again."""
        page.begin("streamed")
        exchange = asked(page, TARGET.bytes[:1])
        assert exchange.body["stream"]
        check_one(exchange.text)
        second = asked(page, TARGET.bytes[1:], turn=1)
        assert images_of(second) == [TARGET.bytes[:1], TARGET.bytes[1:]]

    def several() -> None:
        page.begin("whole")
        exchange = asked(page, TARGET.bytes)
        assert images_of(exchange) == [TARGET.bytes]
        check_several(exchange.text)

    def no_image() -> None:
        page.begin("whole")
        page.upload("picture.png", base64.b64decode(NO_IMAGE))
        page.send(TARGET.question)
        page.wait_answer(REASON)

    return {"one": one, "stream": stream, "several": several, "no_image": no_image}


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="open-webui-"))
    connections = [Connection(RECORDER.url, "none")]
    try:
        with (
            started(folder, connections, **NO_TASKS) as url,
            browsing(url, TARGET.browser, folder) as page,
        ):
            add_model(url, "whole", MODEL, stream_response=False, **PARAMS)
            add_model(url, "streamed", MODEL, **PARAMS)
            run("Open WebUI 0.12.4", **cells(page))
    finally:
        RECORDER.close()
        shutil.rmtree(folder, ignore_errors=True)


main()
