"""The wing of llama.cpp's own API."""

from __future__ import annotations

from server.api.llamacpp import chat, completion, embedding, predict, properties, responses
from server.wing import Wing

ROUTE_FILES = (chat, completion, embedding, predict, properties, responses)
WING = Wing(tuple(file.router for file in ROUTE_FILES))
