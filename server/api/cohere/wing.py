"""The wing of Cohere's API."""

from __future__ import annotations

from server.api.cohere import embed, rerank
from server.wing import Wing

WING = Wing((embed.router, rerank.router))
