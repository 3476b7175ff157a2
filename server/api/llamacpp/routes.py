"""The routes of llama.cpp's own API, for `server.app`."""

from __future__ import annotations

from server.api.llamacpp import chat, completion, embedding, predict, properties, responses

ROUTE_FILES = (chat, completion, embedding, predict, properties, responses)
