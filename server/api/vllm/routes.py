"""The routes that vLLM has besides those of OpenAI's API, for `server.app`."""

from __future__ import annotations

from server.api.vllm import invocations, pooling

ROUTE_FILES = (pooling, invocations)
