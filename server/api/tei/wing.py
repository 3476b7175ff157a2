"""The wing of the routes of text-embeddings-inference; its /rerank is in `server.api.openai`."""

from __future__ import annotations

from server.api.tei import embed, info
from server.wing import Wing

WING = Wing((embed.router, info.router))
