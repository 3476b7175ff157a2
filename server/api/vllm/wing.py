"""The wing of the routes that vLLM has besides those of OpenAI's API."""

from __future__ import annotations

from server.api.vllm import invocations, pooling
from server.wing import Wing

WING = Wing((pooling.router, invocations.router))
