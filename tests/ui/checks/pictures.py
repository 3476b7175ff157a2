"""Pictures in chats: how tests give them to a page, and what it sends."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from typing import Any

from PIL import Image

from tests.support.serve import Server
from tests.support.tiny_smolvlm import noise, png_url
from tests.ui.checks.chat import ask

ROUTE = "**/v1/chat/completions"
LIMIT = 256 * 1024  # bytes of a body that the server of pictures takes

# Gives files to the box to write in, by "drop" or "paste", as a browser does.
GIVE = """
([kind, files]) => {
  const data = new DataTransfer();
  for (const [name, type, content] of files) {
    const bytes = Uint8Array.from(atob(content), (one) => one.charCodeAt(0));
    data.items.add(new File([bytes], name, { type }));
  }
  const options = { bubbles: true, cancelable: true };
  const event = kind === "drop"
    ? new DragEvent(kind, { ...options, dataTransfer: data })
    : new ClipboardEvent(kind, { ...options, clipboardData: data });
  document.querySelector(".composer textarea").dispatchEvent(event);
}
"""


def chat_of(open_page: Callable[..., Any], server: Server, **options: Any) -> Any:
    page = open_page(f"{server.base_url}/ui/", **options)
    page.wait_for_selector("[name=max_tokens]", state="attached")
    return page


def squares(seed: int, width: int = 60, height: int = 40) -> Image.Image:
    return noise(random.Random(seed), width, height)


def user(picture: Image.Image, text: str) -> dict[str, Any]:
    """Return a message as OpenAI's API has it."""
    image = {"type": "image_url", "image_url": {"url": png_url(picture)}}
    return {"role": "user", "content": [image, {"type": "text", "text": text}]}


def file_of(picture: Image.Image, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    picture.save(file, form)
    return file.getvalue()


def give(page: Any, kind: str, *files: tuple[str, str, bytes]) -> None:
    encoded = [[name, type, base64.b64encode(data).decode()] for name, type, data in files]
    page.evaluate(GIVE, [kind, encoded])


def attached(page: Any) -> Any:
    return page.get_by_role("list", name="Attached pictures").get_by_role("listitem")


def urls_of(message: dict[str, Any]) -> list[str]:
    parts = message["content"]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def sent_with(page: Any, text: str) -> tuple[list[dict[str, Any]], Any]:
    """Send a message; return the messages of its request and the answer."""
    with page.expect_request(ROUTE) as sent:
        answer = ask(page, text)
    messages: list[dict[str, Any]] = json.loads(sent.value.post_data)["messages"]
    return messages, answer
