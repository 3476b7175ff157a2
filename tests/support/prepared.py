"""PreparedRequests for tests of the code behind `prepare`."""

from __future__ import annotations

import time
from typing import Any

from starlette.datastructures import Headers

from engine.protocol.generate import SamplingParams
from server.api.openai.schemas.completion import CompletionBody
from server.generation.prepare import PreparedRequest
from server.generation.prompts import Echo


def prepared_request(
    *prompts: list[int], max_tokens: int = 100, echoes: list[Echo] | None = None, **fields: Any
) -> PreparedRequest:
    """Return a request for /v1/completions; `fields` are those of its body."""
    body = CompletionBody(prompt=[*prompts], **fields)
    options = body.options()
    params = SamplingParams(
        max_tokens, logprobs=options.num_logprobs, prompt_logprobs=options.num_prompt_logprobs
    )
    return PreparedRequest(
        model="tiny",
        options=options,
        prompts=[*prompts],
        params=[params] * len(prompts),
        start_token=None,
        echoes=echoes,
        adjusted={},
        fingerprint="fp_0",
        ignored=[],
        arrival=time.monotonic(),
        request_id="req_1",
        headers=Headers(),
        salt="",
    )
