"""`timings` of a response, with the names of llama.cpp's server."""

from __future__ import annotations

from typing import Any

from server.generation.events import Timings


def timing_fields(timings: Timings) -> dict[str, Any]:
    """Return `timings` as llama.cpp's server has it: `predicted` are the generated tokens."""
    return {
        "cache_n": timings.cached_tokens,
        **_rate_fields("prompt", timings.prompt_tokens, timings.prompt_ms),
        **_rate_fields("predicted", timings.generated_tokens, timings.generation_ms),
    }


def _rate_fields(name: str, tokens: int, milliseconds: float) -> dict[str, Any]:
    """Return a number of tokens, their time and their rates. A rate that is unknown is 0."""
    per_token = 0.0
    per_second = 0.0
    if tokens:
        per_token = milliseconds / tokens
    if milliseconds:
        per_second = 1000 * tokens / milliseconds
    return {
        f"{name}_n": tokens,
        f"{name}_ms": round(milliseconds, 3),
        f"{name}_per_token_ms": round(per_token, 3),
        f"{name}_per_second": round(per_second, 3),
    }
