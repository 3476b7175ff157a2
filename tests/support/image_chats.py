"""Chats with images over HTTP, each of whose answers must be the reference's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from PIL import Image

from tests.support import web
from tests.support.serve import Server
from tests.support.tiny_smolvlm import png_url

ANSWER = 8  # tokens


class Reference(Protocol):
    """The served checkpoint in transformers."""

    def answer(self, messages: list[dict[str, Any]], pictures: list[Image.Image], most: int) -> Any:
        """Return (prompt ids, greedy answer ids) of a chat whose pictures are in order."""


@dataclass(frozen=True)
class Turn:
    """A conversation so far, and the tokens of its prompt and of its answer."""

    prompt: list[int]
    answer: list[int]
    num_cached: int


class Conversation:
    """A chat with the server, each of whose answers must be the reference's."""

    def __init__(self, server: Server, reference: Reference) -> None:
        self._server, self._reference = server, reference
        self._pictures: list[Image.Image] = []
        self._shown: list[dict[str, Any]] = []  # as the template reads it
        self._sent: list[dict[str, Any]] = []

    def say(self, text: str, *pictures: Image.Image) -> Turn:
        said = {"type": "text", "text": text}
        urls = [{"type": "image_url", "image_url": {"url": png_url(each)}} for each in pictures]
        self._pictures += pictures
        self._shown.append({"role": "user", "content": [{"type": "image"}] * len(urls) + [said]})
        self._sent.append({"role": "user", "content": [*urls, said]})
        body = {"messages": self._sent, "max_tokens": ANSWER, "temperature": 0}
        url = f"{self._server.base_url}/v1/chat/completions"
        response = web.post(url, json=body | {"return_token_ids": True}, timeout=60)
        assert response.status_code == 200, response.text
        found = response.json()
        prompt, due = self._reference.answer(self._shown, self._pictures, ANSWER)
        choice = found["choices"][0]
        assert found["prompt_token_ids"] == prompt
        assert choice["token_ids"] == due
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        written = {"role": "assistant", "content": "I see."}
        self._shown.append(written)
        self._sent.append(written)
        return Turn(prompt, due, cached)
