"""The wing of Ollama's API."""

from __future__ import annotations

from server.ollama import chat, embed, generate, models, system_one
from server.wing import Wing

ROUTE_FILES = (chat, generate, embed, models, system_one)
WING = Wing(tuple(file.router for file in ROUTE_FILES))
